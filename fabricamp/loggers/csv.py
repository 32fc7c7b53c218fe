"""Logs to a CSV file."""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from fabricamp._utils.files import sync
from fabricamp._utils.types import StateDict
from fabricamp.loggers.append_file import AppendFile
from fabricamp.loggers.row_file import Content, ReadRows, RowFileLogger, Rows


class CSVLogger(RowFileLogger):
    """Logs to ``save_dir/name/version_N/metrics.csv``: a row per call, a column per metric, ``step`` first.

    Rows are written every ``flush_logs_every_n_steps`` steps, before a checkpoint gets its name, and at the end.  Rows are
    appended to an existing file (of an explicit ``version``).  A resumed run removes the rows after its checkpoint.  A metric that
    first appears later gets a new last column.  Rows that the disk refuses wait in memory.

    Args:
        save_dir: the folder of all runs.
        name: the folder of this experiment's runs in it.
        version: the number or name of this run; None is the next free number.
        prefix: a text before each metric's name.
        flush_logs_every_n_steps: number of steps whose rows wait in memory.

    Example:
        >>> logger = CSVLogger("runs", name="digits", flush_logs_every_n_steps=500)
    """

    FILE = "metrics.csv"

    _columns: Sequence[str] = ()
    """The columns of the file, once the file was read."""

    def _read(self) -> tuple[ReadRows, int]:
        self._columns, rows = _read(self.metrics_file)
        return rows, self._digest(rows, 0)

    def _digest(self, rows: ReadRows, before: int) -> int:
        for row in rows:
            texts = sorted((name, "" if value is None else str(value)) for name, value in row.items())
            before = zlib.crc32("\n".join(f"{name}={text}" for name, text in texts if text).encode(), before)
        return before

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        return {"rows": content.rows + len(rows)}

    def _take_back(self, content: Content, state_dict: StateDict) -> None:
        if content.rows <= state_dict["rows"]:
            return
        rows = _read(self.metrics_file)[1][: state_dict["rows"]]
        digest = self._digest(rows, 0)
        if digest == state_dict["digest"]:
            self._rewrite(self._columns, rows)
            self._content = Content().plus(rows, self._file.size, digest)

    def _write(self, rows: Rows) -> None:
        columns = self._columns if self._file.size else ()
        wanted = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        if wanted != list(columns):
            self._rewrite(wanted, _read(self.metrics_file)[1] if self._file.size else [])
        self._file.append(_text(wanted, rows))

    def _rewrite(self, columns: Sequence[str], rows: ReadRows) -> None:
        """Replaces the file by one with these columns and rows."""
        path = self.metrics_file
        new = AppendFile(path.with_name(f".{path.name}.partial"))
        try:
            new.append(_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
            sync(new.path)
            new.path.replace(path)
        finally:
            new.path.unlink(missing_ok=True)
        self._columns = columns
        self._file = AppendFile(path, new.size)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the columns and rows of the file."""
    with path.open(newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        return list(reader.fieldnames or ()), list(reader)


def _text(columns: Sequence[str], rows: ReadRows) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
