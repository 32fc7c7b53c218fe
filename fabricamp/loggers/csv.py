"""Writes what is logged to a CSV file."""

from __future__ import annotations

import csv
import io
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fabricamp.files import sync
from fabricamp.loggers.growing_file import GrowingFile
from fabricamp.loggers.row_file import LOCK, STEP, RowFileLogger
from fabricamp.loggers.run_folder import writes
from fabricamp.loggers.trouble import reason_of


class _Content(NamedTuple):
    """What a file holds: the number of its rows, a digest that tells whether it is these, the steps they begin and end with."""

    rows: int = 0
    digest: int = 0
    steps: tuple[int, ...] = ()

    def plus(self, rows: Sequence[Mapping[str, Any]]) -> _Content:
        digest = self.digest
        for row in rows:
            texts = sorted((name, "" if value is None else str(value)) for name, value in row.items())
            digest = zlib.crc32("\n".join(f"{name}={text}" for name, text in texts if text).encode(), digest)
        steps = [*self.steps, *(int(row[STEP]) for row in rows)]
        return _Content(self.rows + len(rows), digest, (min(steps), max(steps)) if steps else ())


class CSVLogger(RowFileLogger):
    """Logs to ``save_dir/name/version_N/metrics.csv``: a row per call, a column per metric, ``step`` first.

    Rows are written every ``flush_logs_every_n_steps`` steps, before a checkpoint takes its place, and at the end; in a file that
    is there already (an explicit ``version``) they follow those in it.  A run that goes on from a checkpoint takes back the rows
    behind it.  A metric that turns up later gets a new last column.  Rows that the disk refuses wait in memory.

    Args:
        save_dir: the folder of all runs.
        name: the folder of this experiment's runs in it.
        version: the number or name of this run; None is the next free number.
        prefix: stands before each metric's name.
        flush_logs_every_n_steps: how many steps wait in memory.

    Example:
        >>> logger = CSVLogger("runs", name="digits", flush_logs_every_n_steps=500)
    """

    FILE = "metrics.csv"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._columns: list[str] | None = None  # until somebody has looked into the file
        self._content = _Content()

    def state_dict(self) -> dict[str, Any]:
        """How many rows there are, in the file and in memory, and their digest."""
        if not writes():
            return {}
        with LOCK:
            self._begin()
            content = self._content.plus(list(self._rows))
        return {"rows": content.rows, "digest": content.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drops the rows behind those of ``state_dict``, where the file begins with them: they will come again."""
        if not state_dict or not writes():
            return
        with LOCK:
            columns = self._begin()
            if self._content.rows <= state_dict["rows"]:
                return
            rows = _read(self.metrics_file)[1][: state_dict["rows"]]
            if _Content().plus(rows).digest == state_dict["digest"]:
                self._rewrite(columns, rows)

    def close(self) -> None:
        """Writes the rest."""
        super().close()
        self._columns = None

    def _begin(self) -> list[str]:
        """Looks into the file, once; returns its columns.  A last row that a killed run left unfinished does not count."""
        if self._columns is None:
            self._file, self._content = GrowingFile(self.metrics_file), _Content()
            columns: list[str] = []
            if self.metrics_file.exists():
                self._file.cut_to_lines()
                columns, rows = _read(self.metrics_file)
                self._content = _Content().plus(rows)
            self._columns = columns
        return self._columns

    def _write(self) -> None:
        rows = list(self._rows)
        if not rows:
            return
        columns = self._begin()
        wanted = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        try:
            if wanted != columns:
                self._rewrite(wanted, _read(self.metrics_file)[1] if self._file.size else [])
            self._file.append(_text(wanted, rows))
        except FileNotFoundError as error:
            if not self._file.size:
                raise
            # Somebody removed it: what was in it is lost, what comes goes into a new one.
            self.trouble.tell(reason_of(error))
            self.trouble.lose(self._content.rows, self._content.steps)
            self._columns = None
            self._write()
            return
        self._content = self._content.plus(rows)
        del self._rows[: len(rows)]

    def _rewrite(self, columns: list[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Puts a file with these columns and rows in the place of the one that is there."""
        path = self.metrics_file
        new = GrowingFile(path.with_name(f".{path.name}.partial"))
        try:
            new.append(_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
            sync(new.path)
            new.path.replace(path)
        finally:
            new.path.unlink(missing_ok=True)
        self._columns, self._content = columns, _Content().plus(rows)
        self._file = GrowingFile(path, new.size)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Returns columns and rows of the file."""
    with path.open(newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        return list(reader.fieldnames or ()), list(reader)


def _text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
