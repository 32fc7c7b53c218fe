"""What loggers share that write a row for each call into one file of the run's folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fabricamp.errors import ConfigError
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.growing_file import GrowingFile
from fabricamp.loggers.run_folder import RunFolderLogger, writes

STEP = "step"
_MOST_ROWS = 10_000
"""So many rows wait in memory for a disk that refuses them."""

LOCK = threading.Lock()
"""Held where rows go from memory to a file: a checkpoint's writer does that too, in a thread of its own."""


class RowFileLogger(RunFolderLogger):
    """Rows that wait in memory for so many steps, and are appended to ``FILE`` of the run's folder by ``_write``."""

    FILE: ClassVar[str]

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigError(
                f"{type(self).__name__}(flush_logs_every_n_steps={flush_logs_every_n_steps}): choose 1 or more"
            )
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._flushed_step = -1
        self._rows: list[dict[str, float]] = []
        self._file = GrowingFile(self._root)

    @property
    def experiment(self) -> Any:
        """The logger itself, for ``experiment.log_metrics(values, step)``; does nothing on ranks other than 0."""
        return self if writes() else Silent()

    @property
    def metrics_file(self) -> Path:
        """Where the rows are."""
        return self.folder / self.FILE

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """One row."""
        if not metrics or not writes():
            return
        self._rows.append(self._row(self._named(metrics), step))
        if step - self._flushed_step >= self._flush_every:
            self._flushed_step = step
            self.save()

    def save(self) -> None:
        """Appends the rows that are still in memory; the newest of those that the disk refuses stay there."""
        with LOCK, self.trouble.guard():
            self._write()
        self._lose_oldest(len(self._rows) - _MOST_ROWS)

    def barrier(self, step: int) -> None:
        """Returns once the disk has every row that was given so far."""
        self.save()
        with self.trouble.guard():
            self._file.sync()

    def close(self) -> None:
        """Writes the rest."""
        self.save()
        self._lose_oldest(len(self._rows))
        self._flushed_step = -1

    def _row(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        return {STEP: step, **metrics}

    def _write(self) -> None:
        raise NotImplementedError

    def _lose_oldest(self, count: int) -> None:
        if count > 0:
            steps = [int(row[STEP]) for row in self._rows[:count]]
            self.trouble.lose(count, steps)
            del self._rows[:count]
