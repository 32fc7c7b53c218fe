"""Logs to a file of JSON lines."""

from __future__ import annotations

import codecs
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping

from fabricamp.loggers.row_file import STEP, Content, Line, Row, RowFileLogger, Rows, has_step


class JSONLinesLogger(RowFileLogger):
    """Logs to ``save_dir/name/version_N/metrics.jsonl``: an object per call, with ``step`` and ``time`` (seconds since 1970).

    JSON has no nan and inf: they are written as the strings "nan" and "inf", which ``float`` reads.  Lines are written every
    ``flush_logs_every_n_steps`` steps, before a checkpoint gets its name, and at the end.  A resumed run removes the lines after
    its checkpoint.  Lines that the disk refuses wait in memory.

    Args:
        save_dir: the folder of all runs.
        name: the folder of this experiment's runs in it.
        version: the number or name of this run; None is the next free number.
        prefix: a text before each metric's name.
        flush_logs_every_n_steps: number of steps whose lines wait in memory.

    Example:
        >>> logger = JSONLinesLogger("runs", name="digits")
    """

    FILE = "metrics.jsonl"
    EXTENT = "bytes"

    def _row(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        return {STEP: step, "time": round(time.time(), 3), **metrics}

    def _lines(self, content: bytes) -> Iterator[Line]:
        position = 0
        for line in content.splitlines(keepends=True):
            position += len(line)
            # An editor may have changed the ends of lines, and put a byte order mark before the first one.
            written = line.removeprefix(codecs.BOM_UTF8).strip() + b"\n"
            yield Line(_row(written), written, position)

    def _text_of(self, lines: Iterable[Line]) -> bytes:
        return b"".join(line.counted for line in lines if line.row is not None)

    def _counted(self, row: Row) -> bytes:
        return _text([row])

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        return {self.EXTENT: content.size + len(_text(rows))}

    def _write(self, rows: Rows) -> None:
        self._file.append(_text(rows))


def _row(line: bytes) -> dict[str, float | str] | None:
    """Returns a line as a row; None if it is none."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and has_step(row) else None


def _text(rows: Rows) -> bytes:
    return b"".join(json.dumps(_strict(row), allow_nan=False).encode() + b"\n" for row in rows)


def _strict(row: Row) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(float(value)) for name, value in row.items()}
