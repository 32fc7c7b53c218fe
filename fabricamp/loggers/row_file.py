"""What loggers share that write a row for each call into one file of the run's folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fabricamp.errors import ConfigError
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.growing_file import GrowingFile
from fabricamp.loggers.run_folder import RunFolderLogger, writes
from fabricamp.loggers.trouble import reason_of

Rows = Sequence[Mapping[str, Any]]

STEP = "step"
_MOST_ROWS = 10_000
"""So many rows wait in memory for a disk that refuses them."""

_LOCK = threading.Lock()
"""Held where rows go from memory to a file: a checkpoint's writer does that too, in a thread of its own."""


class Content(NamedTuple):
    """What a file holds: the number of its rows, a digest that tells whether it is these, the steps they begin and end with."""

    rows: int = 0
    digest: int = 0
    steps: tuple[int, ...] = ()

    def plus(self, rows: Rows, digest: int) -> Content:
        """Returns this and ``rows``, with the ``digest`` of both."""
        steps = [*self.steps, *(int(row[STEP]) for row in rows)]
        return Content(self.rows + len(rows), digest, (min(steps), max(steps)) if steps else ())


class RowFileLogger(RunFolderLogger):
    """Rows that wait in memory for so many steps, and are appended to ``FILE`` of the run's folder."""

    FILE: ClassVar[str]

    _content: Content | None = None
    """None until somebody has looked into the file."""

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
        with _LOCK, self.trouble.guard():
            self._write()
        self._lose_oldest(len(self._rows) - _MOST_ROWS)

    def barrier(self, step: int) -> None:
        """Returns once the disk has every row that was given so far."""
        self.save()
        with self.trouble.guard():
            self._file.sync()

    def state_dict(self) -> dict[str, Any]:
        """How much there is, in the file and in memory, and its digest."""
        if not writes():
            return {}
        with _LOCK:
            content, rows = self._look(), list(self._rows)
            return {**self._extent(content, rows), "digest": self._digest(rows, content.digest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drops what is behind ``state_dict``, where the file begins with that: it will come again."""
        if state_dict and writes():
            with _LOCK:
                self._take_back(self._look(), state_dict)

    def close(self) -> None:
        """Writes the rest."""
        self.save()
        self._lose_oldest(len(self._rows))
        self._flushed_step, self._content = -1, None

    def _row(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        return {STEP: step, **metrics}

    def _look(self) -> Content:
        """Looks into the file, once.  A last row that a killed run left unfinished does not count."""
        if self._content is None:
            self._file, content = GrowingFile(self.metrics_file), Content()
            if self.metrics_file.exists():
                self._file.cut_to_lines()
                content = content.plus(*self._read())
            self._content = content
        return self._content

    def _write(self) -> None:
        rows = list(self._rows)
        if not rows:
            return
        content = self._look()
        try:
            self._append(rows)
        except FileNotFoundError as error:
            if not self._file.size:
                raise
            # Somebody removed it: what was in it is lost, what comes goes into a new one.
            self.trouble.tell(reason_of(error))
            self.trouble.lose(content.rows, content.steps)
            self._content = None
            self._write()
            return
        self._content = content.plus(rows, self._digest(rows, content.digest))
        del self._rows[: len(rows)]

    def _read(self) -> tuple[Rows, int]:
        """The rows of the file and their digest."""
        raise NotImplementedError

    def _append(self, rows: Rows) -> None:
        """Writes ``rows`` behind those of the file."""
        raise NotImplementedError

    def _digest(self, rows: Rows, before: int) -> int:
        """The digest of ``rows`` behind others with the digest ``before``."""
        raise NotImplementedError

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        """What a checkpoint keeps of the length of the file and ``rows`` behind it."""
        raise NotImplementedError

    def _take_back(self, content: Content, state_dict: dict[str, Any]) -> None:
        """Brings the file to the length that :meth:`_extent` has told, if its beginning has the same digest."""
        raise NotImplementedError

    def _lose_oldest(self, count: int) -> None:
        if count > 0:
            steps = [int(row[STEP]) for row in self._rows[:count]]
            self.trouble.lose(count, steps)
            del self._rows[:count]
