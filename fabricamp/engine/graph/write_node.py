"""Lets a graph wait for a save that still reads weights and optimizer states: where it first writes them, not at its begin."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from fabricamp.ops.write_gate import WRITES, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class WriteNode:
    """The place in a captured call before its first write to what saves read in place: there the graph waits for an event.

    Within the capture the gate is closed, and whoever writes opens it, as in an eager step: that captures the wait.
    """

    def __init__(self) -> None:
        self._waits = False
        self._writes_nothing = False
        self._event: ExternalEvent | None = None

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """A context around the capture; a launch waits as a whole where no save of the run reads in place when it is made."""
        if WRITES.may_close is None:
            yield
            return
        WRITES.open()  # for an earlier save, before anything is captured
        self._event = ExternalEvent()
        WRITES.close(self._capture_wait, WRITES.may_close())
        watch = Watch()
        watch.begin()
        try:
            yield
        finally:
            watch.end()
            WRITES.hand_over()
        self._writes_nothing = not self._waits

    def let_write(self) -> None:
        """Lets the next launch wait for the save that has closed the gate; called before it."""
        if self._writes_nothing:
            return
        if self._event is None or not self._waits:
            WRITES.open()
            return
        wait = WRITES.hand_over()
        assert wait is not None
        self._event.record_after(wait)

    def _capture_wait(self) -> None:
        assert self._event is not None
        self._event.capture_wait()
        self._waits = True


class ExternalEvent:
    """A CUDA event for which a graph waits: what a launch waits for was recorded before it, not in the graph."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(external=True)
        self._stream = _stream_of(torch.cuda.current_device())
        self._event.record(self._stream)  # an event without a record cannot be captured

    def capture_wait(self) -> None:
        """Captures the wait, on the current stream."""
        self._event.wait()

    def record_after(self, wait: Callable[[], None]) -> None:
        """Records the event behind what ``wait`` lets the current stream wait for."""
        with torch.cuda.stream(self._stream):
            wait()
            self._event.record(self._stream)


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """Returns the stream on which the events of a device are recorded; nothing else runs there."""
    return torch.cuda.Stream(device)
