"""Batches prepared before their step, on a GPU beside the steps that run there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.data.transfer import is_small, lies_on_gpu, record_stream
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Callable


class Staging:
    """Runs ``prepare`` on a stream of its own; the stream of the step waits for it, the host never.

    A small batch goes the way of the step instead: it has arrived before two streams have met.
    ``hooked`` says that hooks of the user are in it: what they read may have been written by a step, and in what they
    return there may be tensors that nobody can find.  They run behind the steps that were launched before.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Any], Any] | None, *, hooked: bool) -> None:
        self._prepare = prepare
        self._hooked = hooked
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            # What `prepare` reads (a module's buffers) was written on the stream of the step, before its first batch.
            self._side.wait_stream(stream_in_use(self._side.device))

    def put(self, batch: Any) -> list[Any]:
        """Prepares a batch; returns what :meth:`take` takes."""
        side, prepare = self._side, self._prepare
        if side is None:
            return [batch if prepare is None else prepare(batch)]
        stream = stream_in_use(side.device)
        if not self._hooked and is_small(batch):
            return [batch if prepare is None else prepare(batch), stream]
        copied = torch.cuda.Event()
        if self._hooked or lies_on_gpu(batch):
            # Also keeps memory that tensors nobody knows of have left from being written to while a step reads it.
            side.wait_stream(stream)
        torch.cuda.set_stream(side)  # torch.cuda.stream looks for the current one in ten times as long
        try:
            ready = batch if prepare is None else prepare(batch)
            copied.record(side)
        finally:
            torch.cuda.set_stream(stream)
        # What was given stays as long as it may be read: memory of the step's stream would be used again too early.
        return [ready, copied, batch]

    def take(self, staged: list[Any]) -> Any:
        """Returns the batch for the stream in use, and leaves ``staged`` empty."""
        ready = staged[0]
        if self._side is not None:
            stream, behind = stream_in_use(self._side.device), staged[1]
            if behind is not stream:  # an event of the side stream, or a stream that is not the step's any more
                stream.wait_event(behind) if isinstance(behind, torch.cuda.Event) else stream.wait_stream(behind)
                record_stream(ready, stream)
        staged.clear()
        return ready


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes: torch has 32, and gives the first one again after that."""
    return torch.cuda.Stream(device)
