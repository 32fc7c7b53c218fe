"""Writes what is logged to a CSV file."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from fabricamp.errors import ConfigError
from fabricamp.loggers.run_folder import RunFolderLogger, writes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CSVLogger"]

_STEP = "step"


class CSVLogger(RunFolderLogger):
    """Logs to ``save_dir/name/version_N/metrics.csv``: a row per call, a column per metric, ``step`` first.

    Rows are appended whenever ``flush_logs_every_n_steps`` steps have passed, and at the end; in a folder that has such a file
    already (an explicit ``version``) they follow those in it.  A metric that turns up later gets a new last column.

    Example:
        >>> logger = CSVLogger("runs", name="digits", flush_logs_every_n_steps=500)
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigError(f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps}): choose 1 or more")
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._flushed_step = 0
        self._rows: list[dict[str, float]] = []
        self._columns: list[str] | None = None

    @property
    def metrics_file(self) -> Path:
        """Where the rows are."""
        return self.log_dir / "metrics.csv"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """One row."""
        if not metrics or not writes():
            return
        self._rows.append({_STEP: step, **self._named(metrics)})
        if step - self._flushed_step >= self._flush_every:
            self._flushed_step = step
            self.save()

    def save(self) -> None:
        """Appends the rows that are still in memory."""
        if not self._rows:
            return
        if self._columns is None:
            self._columns = _open(self.metrics_file)
        columns = list(dict.fromkeys([*self._columns, *(name for row in self._rows for name in row)]))
        if columns != self._columns:
            _widen(self.metrics_file, columns)
            self._columns = columns
        with self.metrics_file.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns, lineterminator="\n").writerows(self._rows)
        self._rows.clear()

    def close(self) -> None:
        """Writes the rest."""
        self.save()
        self._columns, self._flushed_step = None, 0


def _open(path: Path) -> list[str]:
    """Returns the columns of the file at ``path``, after cutting off a last row that a killed run left unfinished."""
    if not path.exists():
        return []
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    with path.open(newline="", encoding="utf-8") as text:
        return next(csv.reader(text), [])


def _widen(path: Path, columns: list[str]) -> None:
    """Gives the file at ``path`` these columns, its rows among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.partial")
    with unfinished.open("w", newline="", encoding="utf-8") as new:
        writer = csv.DictWriter(new, columns, lineterminator="\n")
        writer.writeheader()
        if path.exists():
            with path.open(newline="", encoding="utf-8") as old:
                writer.writerows(csv.DictReader(old))
    unfinished.replace(path)
