"""Shared by loggers that write a row per call into one file of the run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fabricamp._utils.types import StateDict
from fabricamp.arguments.checks import check_number
from fabricamp.loggers.append_file import AppendFile
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.logger_errors import reason_of
from fabricamp.loggers.run_folder import RunFolderLogger, writes
from fabricamp.loggers.write_queue import Record

Row: TypeAlias = Mapping[str, float]
Rows: TypeAlias = Sequence[Row]
ReadRows: TypeAlias = Sequence[Mapping[str, float | str]]
"""Rows of a file: a CSV gives texts."""

STEP = "step"


class Content(NamedTuple):
    """The content of a file: numbers of rows and bytes, a digest that identifies the rows, the first and last step."""

    rows: int = 0
    size: int = 0
    digest: int = 0
    steps: tuple[int, ...] = ()

    def plus(self, rows: ReadRows, size: int, digest: int) -> Content:
        """Returns this content with ``rows`` appended; ``size`` and ``digest`` are those of the result."""
        steps = [*self.steps, *(int(row[STEP]) for row in rows)]
        return Content(self.rows + len(rows), size, digest, (min(steps), max(steps)) if steps else ())


def _number(value: object) -> float:
    """Converts a tensor or an array of one value, or a flag, to a number."""
    number: Any = value.item() if hasattr(value, "item") else value
    return float(number) if isinstance(number, bool) else number


class RowFileLogger(RunFolderLogger[Row, Content]):
    """Keeps rows in memory for some steps; a thread then appends them to ``FILE`` in the run's folder."""

    FILE: ClassVar[str]
    MOST_WAITING = 10_000

    _content: Content | None = None
    """Used by the thread only; None until the thread has read the file."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        where = f"{type(self).__name__}: flush_logs_every_n_steps"
        self._flush_every = check_number(where, flush_logs_every_n_steps, least=1)
        self._flushed_step = -1

    @property
    def experiment(self) -> Any:
        """The logger itself, for ``experiment.log_metrics(values, step)``; does nothing on ranks other than 0."""
        return self if writes() else Silent()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows that are not in the file yet, with ``step`` last, as Lightning's ``experiment.metrics`` has them."""
        rows = self._backlog.waiting()
        return [{**{name: value for name, value in row.items() if name != STEP}, STEP: row[STEP]} for row in rows]

    @property
    def metrics_file(self) -> Path:
        """The path of the file with the rows."""
        return self.folder / self.FILE

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs one row."""
        if not metrics or not writes():
            return
        queue = self._backlog
        step = self._at(step)
        values = {name: _number(value) for name, value in self._named(metrics).items()}
        queue.add(Record(step, self._row(values, step)))
        if step - self._flushed_step >= self._flush_every:
            self._flushed_step = step
            queue.write_soon()
            queue.report(self.trouble)

    def state_dict(self) -> StateDict:
        """Returns the length of the log, in the file and in memory, and its digest."""
        if not writes():
            return {}
        content, rows = self._backlog.state()
        return {**self._extent(content, rows), "digest": self._digest(rows, content.digest)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Drops the rows after ``state_dict``, if the file begins with its rows: the resumed run logs the others again."""
        if state_dict and writes():
            self._backlog.update_position(lambda: self._cut(state_dict), patient=True)

    def close(self) -> None:
        """Writes the waiting rows, for up to 30 seconds."""
        super().close()
        self._flushed_step = -1
        self._content = None

    def _row(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        return {STEP: step, **metrics}

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        """Returns, for a checkpoint, the length of the file with ``rows`` appended."""
        raise NotImplementedError

    def _digest(self, rows: Rows, before: int) -> int:
        """Returns the digest of ``rows`` appended to rows with the digest ``before``."""
        raise NotImplementedError

    # -- called by the thread ----------------------------------------------------------------------------------------------------

    def _look(self) -> Content:
        """Reads the file, once; ignores a last row that a killed run left unfinished."""
        if self._content is None:
            self._file = AppendFile(self.metrics_file)
            content = Content()
            if self.metrics_file.exists():
                self._file.cut_to_lines()
                rows, digest = self._read()
                content = content.plus(rows, self._file.size, digest)
            self._content = content
        return self._content

    def _append(self, records: list[Row]) -> Content:
        content = self._look()
        try:
            self._write(records)
        except FileNotFoundError as error:
            if not self._file.size:
                raise
            # Somebody removed the file: its rows are lost, and further rows go into a new file.
            self._backlog.lose(reason_of(error), content.rows, content.steps)
            self._content = None
            return self._append(records)
        self._content = content.plus(records, self._file.size, self._digest(records, content.digest))
        return self._content

    def _sync(self) -> None:
        self._look()
        self._file.sync()

    def _cut(self, state_dict: StateDict) -> Content:
        self._take_back(self._look(), state_dict)
        return self._look()

    def _read(self) -> tuple[ReadRows, int]:
        """Returns the rows of the file and their digest."""
        raise NotImplementedError

    def _write(self, rows: Rows) -> None:
        """Appends ``rows`` to the file."""
        raise NotImplementedError

    def _take_back(self, content: Content, state_dict: StateDict) -> None:
        """Cuts the file to the length in ``state_dict`` (see :meth:`_extent`), if its beginning has the same digest."""
        raise NotImplementedError

    def _begin_anew(self, records: Iterable[Record[Row]] = ()) -> None:
        super()._begin_anew(records)
        self._content = None
