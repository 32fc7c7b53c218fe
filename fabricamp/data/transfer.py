"""Moves batches to a device: at once, or prefetched to a GPU while earlier steps run (:class:`Staging`)."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import torch
from torch import Tensor

from fabricamp._utils.containers import with_parts
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp._utils.types import AnyBatch, Batch

_TENSORS: Final = {Tensor}
_SMALL: Final = 2**16
"""Largest size in bytes that CUDA copies from any memory without a host wait (CUDA Driver API, synchronization behavior)."""

_PLAIN = (str, bytes, int, float, bool, type, type(None))


class _RecordsStream(Protocol):
    """A tensor, or another library's object in a batch, whose memory is not reused while ``stream`` may use it."""

    def record_stream(self, stream: torch.cuda.Stream, /) -> None: ...


def move_to_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Returns ``batch`` with every tensor in it on ``device``; ``batch`` itself if nothing has to move.

    Walks mappings, lists, tuples, namedtuples and dataclasses, and keeps their types.  Calls ``to(device)`` on other objects that
    have it.  The host does not wait for a copy to a GPU; a copy from pinned memory runs concurrently with the computation.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=batch.is_cpu and device.type == "cuda")
    # A fast path for the usual form, a list or tuple of plain tensors: half the time.
    if (type(batch) is list or type(batch) is tuple) and set(map(type, batch)) == _TENSORS:
        to_gpu = device.type == "cuda"
        moved = [tensor.to(device, non_blocking=to_gpu and tensor.is_cpu) for tensor in batch]
        return batch if all(map(operator.is_, moved, batch)) else type(batch)(moved)
    if isinstance(batch, _PLAIN):
        return batch
    to = getattr(batch, "to", None)
    if callable(to):
        moved_object = to(device)
        return batch if moved_object is None else moved_object
    return with_parts(batch, functools.partial(move_to_device, device=device))


def record_stream(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Records for the allocator that ``stream`` uses the tensors in ``batch``, so that their memory is not reused too early."""
    for item in _recordable(batch, set()):
        item.record_stream(stream)


def is_small(batch: Batch) -> bool:
    """Whether ``batch`` is a dense CPU tensor, or a flat list, tuple or dict of these, with at most 64 KiB in total."""
    tensors: Iterable[object]
    if type(batch) is list or type(batch) is tuple:
        tensors = batch
    elif type(batch) is dict:
        tensors = batch.values()
    else:
        tensors = (batch,)
    size = 0
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        size += tensor.nbytes
    return size <= _SMALL


def lies_on_gpu(batch: Batch) -> bool:
    """Whether ``batch`` contains a CUDA tensor or an object with ``record_stream``."""
    if type(batch) is list or type(batch) is tuple:  # a fast path for the usual form: a tenth of the time
        for tensor in batch:
            if type(tensor) is not Tensor:
                break
            if tensor.is_cuda:
                return True
        else:
            return False
    return next(_recordable(batch, set()), None) is not None


def _recordable(item: object, seen: set[int]) -> Iterator[_RecordsStream]:
    """Yields the CUDA tensors in ``item``, and objects with their own ``record_stream``."""
    if isinstance(item, Tensor):
        if item.is_cuda:
            yield item
        return
    if isinstance(item, _PLAIN) or id(item) in seen:
        return
    seen.add(id(item))
    if _records_stream(item):
        yield item
        return
    for value in _values_of(item):
        yield from _recordable(value, seen)


def _records_stream(item: object) -> TypeGuard[_RecordsStream]:
    return callable(getattr(item, "record_stream", None))


def _values_of(item: object) -> list[object]:
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, Mapping):
        return list(item.values())
    if dataclasses.is_dataclass(item) or hasattr(item, "to"):
        return list(getattr(item, "__dict__", {}).values()) or [
            getattr(item, name) for name in getattr(item, "__slots__", ())
        ]
    return []


class Staging:
    """Runs ``prepare`` on a side stream; the stream of the step waits for it, the host never does.

    A small batch is prepared on the stream of the step instead: its copy takes less time than the synchronisation of two streams.
    ``hooked``: ``prepare`` contains hooks of the user.  They run after the steps that were launched before, since they may read
    what a step has written, and may return tensors that cannot be found in the batch.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Batch], Batch] | None, *, hooked: bool) -> None:
        self._prepare = prepare
        self._hooked = hooked
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            # What `prepare` reads (a module's buffers) was written on the stream of the step, before its first batch.
            self._side.wait_stream(stream_in_use(self._side.device))

    def put(self, batch: Batch) -> list[Any]:
        """Prepares a batch; returns a list for :meth:`take`."""
        side = self._side
        prepare = self._prepare
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

    def take(self, staged: list[Any]) -> Batch:
        """Returns the batch, ready for the current stream, and empties ``staged``."""
        ready = staged[0]
        if self._side is not None:
            stream = stream_in_use(self._side.device)
            prepared_by = staged[1]  # an event of the side stream, or what was the step's stream then
            if prepared_by is not stream:
                if isinstance(prepared_by, torch.cuda.Event):
                    stream.wait_event(prepared_by)
                else:
                    stream.wait_stream(prepared_by)
                record_stream(ready, stream)
        staged.clear()
        return ready


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all passes: torch has 32 streams, and after these returns the first one again."""
    return torch.cuda.Stream(device)
