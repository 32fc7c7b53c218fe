"""Logs to a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from fabricamp.loggers.row_file import STEP, Content, Line, NoRowsError, ReadRow, RowFileLogger, Rows, has_step


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

    FILE = NAME_METRICS_FILE = "metrics.csv"
    EXTENT = "rows"

    _columns: Sequence[str] = ()
    """The columns of the file, once the file was read."""

    def _lines(self, content: bytes) -> Iterator[Line]:
        lines = content.splitlines(keepends=True)
        columns, end = _columns_of(lines)
        self._columns = columns
        position = sum(map(len, lines[:end]))
        for line in lines[end:]:
            position += len(line)
            if line.strip():
                row = _row(line, columns)
                yield Line(row, b"" if row is None else self._counted(row), position)

    def _text_of(self, lines: Iterable[Line]) -> bytes:
        rows = [line.row for line in lines if line.row is not None]  # first: this reads the columns
        return _text(self._columns, [_header(self._columns), *rows]) if self._columns else b""

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        return {self.EXTENT: content.rows + len(rows)}

    def _counted(self, row: ReadRow) -> bytes:
        texts = sorted((name, "" if value is None else str(value)) for name, value in row.items())
        return "\n".join(f"{name}={text}" for name, text in texts if text).encode()

    def _write(self, rows: Rows) -> None:
        columns = self._columns if self._file.size else ()
        wanted = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        if not self._file.size:
            self._file.append(_text(wanted, [_header(wanted), *rows]))
        else:
            if wanted != list(columns):
                written = [line.row for line in self._lines(self._file.read()) if line.row is not None]
                self._file.replace(_text(wanted, [_header(wanted), *written]))
            self._file.append(_text(wanted, rows))
        self._columns = wanted


def _header(columns: Sequence[str]) -> dict[str, str]:
    return dict(zip(columns, columns, strict=True))


def _columns_of(lines: Sequence[bytes]) -> tuple[list[str], int]:
    """Returns the columns and the number of lines that they take; raises :class:`NoRowsError` if rows cannot be read by them."""
    reader = csv.reader((line.decode("utf-8-sig") for line in lines), strict=True)
    try:
        columns = next(reader, [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise NoRowsError(f"its first line cannot be read ({error})") from None
    if lines and (STEP not in columns or len(set(columns)) < len(columns)):
        raise NoRowsError(f"its first line does not name the columns of a log, {STEP!r} among them")
    return columns, reader.line_num


def _row(line: bytes, columns: Sequence[str]) -> dict[str, str] | None:
    """Returns a line as a row; None if it is none.  A line alone: a quote that is not closed costs no further lines."""
    if b"\0" in line:
        return None
    try:
        fields = next(csv.reader([line.decode()], strict=True))
    except (csv.Error, UnicodeDecodeError, StopIteration):
        return None
    row = dict(zip(columns, fields, strict=False))
    return row if len(fields) <= len(columns) and has_step(row) else None


def _text(columns: Sequence[str], rows: Sequence[ReadRow]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
