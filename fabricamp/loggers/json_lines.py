"""Logs to a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Mapping

from fabricamp._utils.types import StateDict
from fabricamp.loggers.row_file import STEP, Content, Row, RowFileLogger, Rows


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

    def _row(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        return {STEP: step, "time": round(time.time(), 3), **metrics}

    def _read(self) -> tuple[Rows, int]:
        content = self.metrics_file.read_bytes()
        return [json.loads(line) for line in content.splitlines()], zlib.crc32(content)

    def _digest(self, rows: Rows, before: int) -> int:
        return zlib.crc32(_text(rows), before)

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        return {"bytes": content.size + len(_text(rows))}

    def _take_back(self, content: Content, state_dict: StateDict) -> None:
        size = state_dict["bytes"]
        if content.size > size and zlib.crc32(self.metrics_file.read_bytes()[:size]) == state_dict["digest"]:
            os.truncate(self.metrics_file, size)
            self._content = None

    def _write(self, rows: Rows) -> None:
        self._file.append(_text(rows))


def _text(rows: Rows) -> bytes:
    return b"".join(json.dumps(_strict(row), allow_nan=False).encode() + b"\n" for row in rows)


def _strict(row: Row) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(float(value)) for name, value in row.items()}
