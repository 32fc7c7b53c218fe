"""Shared by loggers that write a row per call into one file of the run's folder."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fabricamp._utils.types import StateDict
from fabricamp.arguments.checks import check_number
from fabricamp.loggers.append_file import AppendFile, SharedFileError
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.logger_errors import reason_of
from fabricamp.loggers.run_folder import RUNS, RunFolderLogger, writes
from fabricamp.loggers.write_queue import Record

Row: TypeAlias = Mapping[str, float]
Rows: TypeAlias = Sequence[Row]
ReadRow: TypeAlias = Mapping[str, float | str]
"""A row of a file: a CSV gives texts."""
ReadRows: TypeAlias = Sequence[ReadRow]

STEP = "step"
_STEPS = 2**63
"""Steps are smaller."""


EPOCH = "epoch"


class Line(NamedTuple):
    """A line of a file: its row, None if it cannot be read, with what counts for the digest, and the position of the line's end."""

    row: ReadRow | None
    counted: bytes
    end: int


class NoRowsError(ValueError):
    """The file is not one of this logger's: no row of it can be read."""


class Content(NamedTuple):
    """The content of a file: numbers of rows and bytes, a digest that identifies the rows, the first and last step."""

    rows: int = 0
    size: int = 0
    digest: int = 0
    steps: tuple[int, ...] = ()

    def plus(self, rows: ReadRows, size: int, digest: int) -> Content:
        """Returns this content with ``rows`` appended; ``size`` and ``digest`` are those of the result."""
        steps = [*self.steps, *(int(float(row[STEP])) for row in rows)]
        return Content(self.rows + len(rows), size, digest, (min(steps), max(steps)) if steps else ())


def _described(error: SharedFileError | NoRowsError) -> str:
    return (
        f"{error.strerror}: {error.filename}" if isinstance(error, SharedFileError) else f"the log is damaged: {error}"
    )


def has_step(row: Mapping[str, object]) -> bool:
    """Returns whether a row that was read has a step that a run may have."""
    try:
        return abs(float(row[STEP])) < _STEPS  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _number(value: object) -> float:
    """Converts a tensor or an array of one value, or a flag, to a number."""
    number: Any = value.item() if hasattr(value, "item") else value
    return float(number) if isinstance(number, bool) else number


class RowFileLogger(RunFolderLogger[Row, Content]):
    """Keeps rows in memory for some steps; a thread then appends them to ``FILE`` in the run's folder.

    What is in the file already may be of anybody and may be damaged: lines that cannot be read are passed over, and if there is
    nothing to go on from, or another process writes to the file, this run goes on in a file of its own.
    """

    FILE: ClassVar[str]
    EXTENT: ClassVar[str]
    """The key of a checkpoint's state with the length of the log."""
    MOST_WAITING = 10_000

    _number = 0
    """The number in the name of the run's own file; 0 is ``FILE`` itself."""
    _content: Content | None = None
    """Used by the thread only; None until the thread has read the file."""
    _is_clean = True
    """Whether the file is as this logger writes it: without lines that cannot be read, or other ends of lines."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = RUNS,
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
        return self._file_number(self._number)

    @property
    def metrics_file_path(self) -> str:
        """The same as text, as Lightning's ``experiment`` has it."""
        return str(self.metrics_file)

    def _file_number(self, number: int) -> Path:
        name = Path(self.FILE)
        return self.folder / (f"{name.stem}-{number}{name.suffix}" if number else name)

    def identity(self) -> int | str:
        """Returns the version; looks at the file, so that the first write sees whether another process has written meanwhile."""
        version = super().identity()  # before the thread asks for the folder
        self._backlog.call_soon(self._look)
        return version

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
        """Returns the length of the log, in the file and in memory, and its digest; the file's number, if it has one."""
        if not writes():
            return {}
        content, rows = self._backlog.state()
        state = {**self._extent(content, rows), "digest": self._digest(rows, content.digest)}
        return {**state, "file": self._number} if self._number else state

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
        first = {name: metrics[name] for name in (EPOCH,) if name in metrics}
        return {STEP: step, **first, **metrics}

    def _extent(self, content: Content, rows: Rows) -> dict[str, int]:
        """Returns, for a checkpoint, the length of the file with ``rows`` appended, under ``EXTENT``."""
        raise NotImplementedError

    def _digest(self, rows: Rows, before: int) -> int:
        """Returns the digest of ``rows`` appended to rows with the digest ``before``."""
        for row in rows:
            before = zlib.crc32(self._counted(row), before)
        return before

    def _counted(self, row: Row) -> bytes:
        """Returns what of ``row`` counts for digests."""
        raise NotImplementedError

    # -- called by the thread ----------------------------------------------------------------------------------------------------

    def _look(self) -> Content:
        """Reads the file, once; ignores a last row that a killed run left unfinished."""
        if self._content is None:
            self._file = AppendFile(self.metrics_file)
            self._is_clean = True
            content = Content()
            try:
                if self._file.adopt():
                    rows, digest = self._read()
                    content = content.plus(rows, self._readable_size, digest)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - the file may hold anything
                self._go_on_apart(f"{self.metrics_file} is no log that can be read: {error}")
            self._content = content
        return self._content

    @property
    def _readable_size(self) -> int:
        """The number of bytes that the rows of the file take as this logger writes them."""
        return self._file.size if self._is_clean else len(self._text_of(self._lines(self._file.read())))

    def _read(self) -> tuple[ReadRows, int]:
        """Returns the rows of the file and their digest; tells of lines that cannot be read."""
        content = self._file.read()
        lines = list(self._lines(content))
        self._is_clean = self._text_of(lines) == content
        readable = [line for line in lines if line.row is not None]
        if lines and not readable:
            raise NoRowsError("no line is a row")
        damaged = len(lines) - len(readable)
        if damaged:
            which = "a line" if damaged == 1 else f"{damaged} lines"
            self._backlog.say(f"{which} of {self._file.path} cannot be read, and will be left out; training continues")
        digest = 0
        for line in readable:
            digest = zlib.crc32(line.counted, digest)
        return [line.row for line in readable if line.row is not None], digest

    def _go_on_apart(self, reason: str) -> None:
        """Leaves the file as it is, and goes on in the next file whose name is free."""
        while os.path.lexists(self.metrics_file):
            self._number += 1
        self._file = AppendFile(self.metrics_file)
        self._is_clean = True
        self._content = Content()
        self._backlog.say(f"{reason}; this run goes on in {self.metrics_file}")

    def _append(self, records: list[Row]) -> Content:
        content = self._look()
        try:
            if not self._is_clean:  # an open quote, for one, would cost readers of the file all further rows
                self._file.replace(self._text_of(self._lines(self._file.read())))
                self._is_clean = True
            self._write(records)
        except (SharedFileError, NoRowsError) as error:
            self._go_on_apart(_described(error))
            return self._append(records)
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
        number = state_dict.get("file", 0)
        if type(number) is int and number > 0 and self._file_number(number).exists():
            self._number = number
            self._content = None
        content = self._look()
        try:
            self._take_back(content, state_dict)
        except (SharedFileError, NoRowsError) as error:
            self._go_on_apart(_described(error))
        return self._look()

    def _take_back(self, content: Content, state_dict: StateDict) -> None:
        """Drops the rows after those of ``state_dict`` (see :meth:`_extent`), if the file begins with these.

        The next write cuts them off, and not this call: if another process still writes to the file, it is seen before that write.
        """
        wanted = state_dict[self.EXTENT]
        if self._extent(content, ())[self.EXTENT] <= wanted:
            return
        kept = Content()
        end = 0
        for line in self._lines(self._file.read()):
            if self._extent(kept, ())[self.EXTENT] >= wanted:
                break
            if line.row is not None:
                kept = kept.plus([line.row], kept.size + len(line.counted), zlib.crc32(line.counted, kept.digest))
                end = line.end
        if (self._extent(kept, ())[self.EXTENT], kept.digest) == (wanted, state_dict["digest"]):
            self._file.size = end
            self._content = kept
        else:
            self._backlog.say(
                f"{self._file.path} does not begin with the rows that the checkpoint counts: all its rows stay, and those after "
                "the checkpoint may be there twice"
            )

    def _lines(self, content: bytes) -> Iterator[Line]:
        """Yields the lines of a file with ``content``; raises :class:`NoRowsError` if it is not a file of this logger's."""
        raise NotImplementedError

    def _text_of(self, lines: Iterable[Line]) -> bytes:
        """Returns a file with the rows of ``lines``, as this logger writes them."""
        raise NotImplementedError

    def _write(self, rows: Rows) -> None:
        """Appends ``rows`` to the file."""
        raise NotImplementedError

    def _begin_anew(self, records: Iterable[Record[Row]] = ()) -> None:
        super()._begin_anew(records)
        self._content = None
