"""TensorBoard's event files: written in complete events, and continued from a checkpoint's position."""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

from fabricamp.loggers.append_file import AppendFile
from fabricamp.loggers.logger_errors import reason_of

_SECONDS = re.compile(r"tfevents\.(\d+)")
_numbers = itertools.count()
_FRAME = 16
"""Bytes of a record besides the event itself: its length and two checksums."""


class WrittenEvent(Protocol):
    """What is asked of TensorBoard's ``Event``, a message of protobuf whose package has no types."""

    step: int
    session_log: _SessionLog

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        """Returns whether the event has a "summary" (values), or a "session_log" (a mark that a run begins)."""
        ...

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Returns the number of bytes in a file."""
        ...

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Returns the bytes in a file."""
        ...


class _SessionLog(Protocol):
    status: int


class Scalars(NamedTuple):
    """Points of curves; the writing thread converts them to an event."""

    step: int
    wall_time: float
    values: Mapping[str, float]

    def event(self) -> WrittenEvent:
        """Returns one event for all points; ``SummaryWriter.add_scalar`` makes one per point, at several times the cost."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in self.values.items()]
        event: WrittenEvent = Event(step=self.step, wall_time=self.wall_time, summary=Summary(value=values))
        return event


class FilePosition(NamedTuple):
    """A position in an event file: the file's name and a number of bytes."""

    file: str
    bytes: int


class EventFile:
    """Appends complete events to a new file in ``folder``; only the writing thread calls its methods.

    If somebody has removed the file, ``lost`` is called with (reason, number of lost events, first and last step).
    """

    def __init__(
        self, folder: Path, lost: Callable[[str, int, Sequence[int]], None], *, suffix: str, private: bool
    ) -> None:
        self.folder = folder
        self._lost = lost
        self._suffix = suffix
        self.private = private
        self._file: AppendFile | None = None
        self._num_events = 0  # in the file
        self._steps: tuple[int, ...] = ()  # the first and last step of these

    def look(self) -> FilePosition:
        """Returns the position after the last written event."""
        file = self._open()
        return FilePosition(file.path.name, file.size or len(self._head))

    def append(self, contents: Sequence[WrittenEvent | Scalars]) -> FilePosition:
        """Writes the events; returns the position after them."""
        events = [one.event() if isinstance(one, Scalars) else one for one in contents]
        file = self._open()
        try:
            head = b"" if file.size else self._head
            file.append(head + b"".join(_record(event) for event in events))
        except FileNotFoundError as error:
            if not file.size:
                raise
            # Somebody removed the file: its events are lost, and further events go into a new file.
            self._lost(reason_of(error), self._num_events, self._steps)
            self._file = None
            return self.append(events)
        steps = [*self._steps, *(event.step for event in events)]
        self._num_events += len(events)
        self._steps = (min(steps), max(steps))
        return self.look()

    def sync(self) -> None:
        """Returns once all written events are on disk."""
        if self._file is not None:
            self._file.sync()

    def continue_from(self, name: str, size: int) -> list[WrittenEvent] | None:
        """Returns the events that hide everything after that position from TensorBoard; None if it is not in this folder.

        The events after the position may have any steps, and TensorBoard drops everything from the smallest of these steps on.  So
        the dropped events from before the position are written again.
        """
        file = self._open()
        others = sorted(path for path in self.folder.glob("*tfevents*") if path != file.path)
        resumed = next((path for path in others if path.name == name), None)
        if resumed is None or resumed.stat().st_size < size:
            return None
        after = [event for path in others if path.name > name for event in self._readable(path)]
        after += self._readable(resumed, since=size)
        steps = [event.step for event in after if event.HasField("summary")]
        if not steps:
            return []
        before = [event for path in others if path.name < name for event in self._readable(path)]
        before += self._readable(resumed, until=size)
        if file.size:
            before += self._readable(file.path)
        return purge(min(steps), before)

    def _readable(self, path: Path, since: int = 0, until: int | None = None) -> list[WrittenEvent]:
        """Returns the events of :func:`read_events` before the first that is damaged, at which TensorBoard stops too."""
        events: list[WrittenEvent] = []
        try:
            events.extend(read_events(path, since, until))
        except DecodeError:
            self._lost(f"{path} is damaged after {len(events)} events", 0, ())
        return events

    def _open(self) -> AppendFile:
        if self._file is not None:
            return self._file
        # TensorBoard reads files in the order of their names: this name sorts last, whatever the clock says.
        seconds = [int(match[1]) for path in self.folder.glob("*tfevents*") if (match := _SECONDS.search(path.name))]
        second = max([int(time.time()), *(earlier + 1 for earlier in seconds)])
        number = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}{self._suffix}"
        name = f"events.out.tfevents.{second:010d}.{number}"
        first = Event(wall_time=time.time(), file_version="brain.Event:2")
        first.source_metadata.writer = "fabricamp.loggers.TensorBoardLogger"
        self._head = _record(first)
        self._num_events = 0
        self._steps = ()
        self._file = AppendFile(self.folder / name, private=self.private)
        return self._file


class EventWriter(SummaryWriter):
    """torch's ``SummaryWriter``, with each event passed to ``take``: torch's own thread ends with the first full disk."""

    def __init__(
        self, folder: Path, take: Callable[[WrittenEvent], None], flush: Callable[[], None], purge_step: int | None
    ) -> None:
        self._events = _Events(folder, take, flush)
        super().__init__(str(folder), purge_step=purge_step)

    def _get_file_writer(self) -> Any:
        this: Any = self  # its class declares both attributes as None
        if this.file_writer is None:
            this.file_writer = _FileWriter(self._events)
            this.all_writers = {self._events.get_logdir(): this.file_writer}
            if self.purge_step is not None:
                for event in purge(self.purge_step):
                    self._events.add_event(event)
                self.purge_step = None
        return this.file_writer


class _FileWriter(FileWriter):
    def __init__(self, events: _Events) -> None:
        self.event_writer = events


class _Events:
    """The event writer that torch's ``FileWriter`` uses."""

    def __init__(self, folder: Path, take: Callable[[WrittenEvent], None], flush: Callable[[], None]) -> None:
        self._folder = folder
        self.add_event = take
        self.flush = flush
        self.close = flush

    def get_logdir(self) -> str:
        """Returns the folder."""
        return str(self._folder)

    def reopen(self) -> None:
        """Does nothing: the file is opened for each write."""


def purge(step: int, written: Iterable[WrittenEvent] = ()) -> list[WrittenEvent]:
    """Returns the events that make TensorBoard drop everything from ``step`` on, and the valid events of ``written`` again."""
    now = time.time()
    start = Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START))
    valid: list[WrittenEvent] = []
    for event in written:
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            valid = [earlier for earlier in valid if earlier.step < event.step]
        elif event.HasField("summary") and event.step >= step:
            valid.append(event)
    return [Event(wall_time=now, step=step, file_version="brain.Event:2"), start, *valid]


def size_of(content: WrittenEvent | Scalars) -> int:
    """Returns the number of bytes that ``content`` takes in a file."""
    event = content.event() if isinstance(content, Scalars) else content
    return int(event.ByteSize()) + _FRAME


def _record(event: WrittenEvent) -> bytes:
    """Returns the bytes of an event in a file, with its length and checksums."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def read_events(path: Path, since: int = 0, until: int | None = None) -> Iterator[WrittenEvent]:
    """Yields the events of a file between two positions; omits an incomplete last event."""
    content = path.read_bytes()[:until]
    while len(content) >= since + 12:
        (length,) = struct.unpack_from("<Q", content, since)
        end = since + 12 + length + 4
        if end > len(content):
            return
        yield Event.FromString(content[since + 12 : end - 4])
        since = end
