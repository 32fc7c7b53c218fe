"""TensorBoard's event files: written by whole events, and taken up again behind a checkpoint's place."""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

from fabricamp.loggers.growing_file import GrowingFile
from fabricamp.loggers.trouble import Trouble, reason_of

_MOST_BYTES = 64 * 2**20
"""So much waits in memory for a disk that refuses it."""

_SECONDS = re.compile(r"tfevents\.(\d+)")
_numbers = itertools.count()


class EventFile:
    """What torch's ``FileWriter`` writes to: a new file in ``folder``.

    Nothing here raises ``OSError``: events that the disk refuses wait in memory, the newest of them, and ``trouble`` tells.
    """

    def __init__(
        self, folder: Path, trouble: Trouble, *, max_queue: int, flush_secs: float, suffix: str, private: bool
    ) -> None:
        self._folder = folder
        self._trouble = trouble
        self._most_waiting = max_queue
        self._flush_seconds = flush_secs
        self._suffix = suffix
        self.private = private
        self._lock = threading.RLock()  # a checkpoint's writer flushes too
        self._flushed_at = time.monotonic()
        self._events: list[tuple[int, bytes]] = []
        self._open_file()

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last event: the file, and so many bytes of it."""
        with self._lock:
            start = self._file.size or len(self._head)
            return {"file": self._file.path.name, "bytes": start + sum(len(record) for _, record in self._events)}

    def go_on_from(self, name: str, size: int) -> bool:
        """Hides from TensorBoard what stands behind that place, if it is in this folder; returns whether it is.

        What is behind may have any steps, and TensorBoard forgets all from one step on: what stood before it is written again.
        """
        self.flush()
        others = sorted(path for path in self._folder.glob("*tfevents*") if path != self._file.path)
        found = next((path for path in others if path.name == name), None)
        if found is None or found.stat().st_size < size:
            return False
        before: list[tuple[Path, int | None]] = [(path, None) for path in others if path.name < name]
        before.append((found, size))
        if self._file.size:
            before.append((self._file.path, None))
        behind = [event for path in others if path.name > name for event in read_events(path)]
        behind += read_events(found, since=size)
        steps = [event.step for event in behind if event.HasField("summary")]
        if steps:
            self.purge(min(steps), [event for path, end in before for event in read_events(path, until=end)])
        return True

    def purge(self, step: int, written: list[Any] | None = None) -> None:
        """Lets TensorBoard forget everything from ``step`` on but for what is valid of ``written``."""
        self.add_event(Event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
        valid: list[Any] = []
        for event in written or ():
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                valid = [one for one in valid if one.step < event.step]
            elif event.HasField("summary") and event.step >= step:
                valid.append(event)
        for event in valid:
            self.add_event(event)

    # -- what FileWriter calls ---------------------------------------------------------------------------------------------------

    def get_logdir(self) -> str:
        """The folder."""
        return str(self._folder)

    def add_event(self, event: Any) -> None:
        """Takes an event; writes now and then."""
        with self._lock:
            self._events.append((event.step, _record(event)))
            late = time.monotonic() >= self._flushed_at + self._flush_seconds
            if late or len(self._events) > self._most_waiting:
                self.flush()

    def flush(self) -> None:
        """Writes what is still in memory."""
        with self._lock, self._trouble.guard():
            self._flushed_at = time.monotonic()
            self._write()
        if sum(len(one) for _, one in self._events) > _MOST_BYTES:
            self._lose_waiting()

    def sync(self) -> None:
        """Returns once the disk has every event that was given so far."""
        self.flush()
        with self._trouble.guard():
            self._file.sync()

    def reopen(self) -> None:
        """The file is opened for each write."""

    def close(self) -> None:
        """Writes the rest."""
        self.flush()
        self._lose_waiting()

    # -- the file ----------------------------------------------------------------------------------------------------------------

    def _open_file(self) -> None:
        # TensorBoard reads files in the order of their names: this one comes last, whatever the clock says.
        seconds = [int(match[1]) for path in self._folder.glob("*tfevents*") if (match := _SECONDS.search(path.name))]
        second = max([int(time.time()), *(one + 1 for one in seconds)])
        number = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}{self._suffix}"
        name = f"events.out.tfevents.{second:010d}.{number}"
        self._file = GrowingFile(self._folder / name, private=self.private)
        first = Event(wall_time=time.time(), file_version="brain.Event:2")
        first.source_metadata.writer = "fabricamp.loggers.TensorBoardLogger"
        self._head = _record(first)
        self._there = 0
        self._steps: tuple[int, ...] = ()

    def _write(self) -> None:
        events = list(self._events)
        if not events:
            return
        try:
            head = b"" if self._file.size else self._head
            self._file.append(head + b"".join(record for _, record in events))
        except FileNotFoundError as error:
            if not self._file.size:
                raise
            # Somebody removed it: what was in it is lost, what comes goes into a new one.
            self._trouble.tell(reason_of(error))
            self._trouble.lose(self._there, self._steps)
            self._open_file()
            self._write()
            return
        steps = [*self._steps, *(step for step, _ in events)]
        self._there, self._steps = self._there + len(events), (min(steps), max(steps))
        del self._events[: len(events)]

    def _lose_waiting(self) -> None:
        with self._lock:
            self._trouble.lose(len(self._events), [step for step, _ in self._events])
            self._events.clear()


class EventWriter(SummaryWriter):
    """torch's ``SummaryWriter`` on an :class:`EventFile`, instead of one with a thread that ends with the first full disk."""

    def __init__(self, file: EventFile, purge_step: int | None) -> None:
        self._file = file
        super().__init__(file.get_logdir(), purge_step=purge_step)

    def _get_file_writer(self) -> Any:
        this: Any = self  # its class says that both are None
        if this.file_writer is None:
            this.file_writer = _FileWriter(self._file)
            this.all_writers = {self._file.get_logdir(): this.file_writer}
            if self.purge_step is not None:
                self._file.purge(self.purge_step)
                self.purge_step = None
        return this.file_writer


class _FileWriter(FileWriter):
    def __init__(self, file: EventFile) -> None:
        self.event_writer = file


def _record(event: Any) -> bytes:
    """The event as it stands in a file, with its length and checksums."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def read_events(path: Path, since: int = 0, until: int | None = None) -> Iterator[Any]:
    """The events of a file between two places; a last one that is not whole is left out."""
    content = path.read_bytes()[:until]
    while len(content) >= since + 12:
        (length,) = struct.unpack_from("<Q", content, since)
        end = since + 12 + length + 4
        if end > len(content):
            return
        yield Event.FromString(content[since + 12 : end - 4])
        since = end
