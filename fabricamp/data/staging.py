"""Prepares batches ahead of their step; on a GPU, concurrently with the steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.data.transfer import is_small, lies_on_gpu, record_stream
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Callable


class Staging:
    """Runs ``prepare`` on a side stream; the stream of the step waits for it, the host never does.

    A small batch is prepared on the stream of the step instead: its copy takes less time than the synchronisation of two streams.
    ``hooked``: ``prepare`` contains hooks of the user.  They run after the steps that were launched before, since they may read
    what a step has written, and may return tensors that cannot be found in the batch.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Any], Any] | None, *, hooked: bool) -> None:
        self._prepare = prepare
        self._hooked = hooked
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            # What `prepare` reads (a module's buffers) was written on the stream of the step, before its first batch.
            self._side.wait_stream(stream_in_use(self._side.device))

    def put(self, batch: Any) -> list[Any]:
        """Prepares a batch; returns a list for :meth:`take`."""
        side, prepare = self._side, self._prepare
        if side is None:
            return [batch if prepare is None else prepare(batch)]
        stream = stream_in_use(side.device)
        if not self._hooked and is_small(batch):
            return [batch if prepare is None else prepare(batch), stream]
        copied = torch.cuda.Event()
        if self._hooked or lies_on_gpu(batch):
            # Also for tensors that record_stream cannot find: their freed memory is not written while a step still reads it.
            side.wait_stream(stream)
        torch.cuda.set_stream(side)  # torch.cuda.stream() takes ten times as long to find the current stream
        try:
            ready = batch if prepare is None else prepare(batch)
            copied.record(side)
        finally:
            torch.cuda.set_stream(stream)
        # The given batch is kept while the side stream may read it: memory of the step's stream would be reused too early.
        return [ready, copied, batch]

    def take(self, staged: list[Any]) -> Any:
        """Returns the batch, ready for the current stream, and empties ``staged``."""
        ready = staged[0]
        if self._side is not None:
            stream, behind = stream_in_use(self._side.device), staged[1]
            if behind is not stream:  # an event of the side stream, or the step's former stream
                stream.wait_event(behind) if isinstance(behind, torch.cuda.Event) else stream.wait_stream(behind)
                record_stream(ready, stream)
        staged.clear()
        return ready


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all passes: torch has 32 streams, and after these returns the first one again."""
    return torch.cuda.Stream(device)
