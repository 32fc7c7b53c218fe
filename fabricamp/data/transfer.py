"""A batch and the tensors in it, whatever holds them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fabricamp.containers import with_parts

_FLAT: Final = (list, tuple)
_TENSORS: Final = {Tensor}
_SMALL: Final = 2**16
"""Bytes that CUDA copies to a GPU without a wait of the host, from any memory (CUDA Driver API, synchronization behavior)."""

_PLAIN = (str, bytes, int, float, bool, type, type(None))


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Returns ``batch`` with every tensor in it on ``device``; ``batch`` itself where nothing has to move.

    Walks mappings, lists, tuples, namedtuples and dataclasses, whose types are kept, and calls ``to(device)`` of what
    else has it.  The host does not wait for a copy to a GPU; from pinned memory it runs beside the computation.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=batch.is_cpu and device.type == "cuda")
    if _is_flat(batch):  # the usual form, in half the time
        waits_not = device.type == "cuda"
        moved = [one.to(device, non_blocking=waits_not and one.is_cpu) for one in batch]
        return batch if all(map(operator.is_, moved, batch)) else type(batch)(moved)
    if isinstance(batch, _PLAIN):
        return batch
    if callable(getattr(batch, "to", None)):
        moved = batch.to(device)
        return batch if moved is None else moved
    return with_parts(batch, functools.partial(move_to_device, device=device))


def _is_flat(batch: Any) -> bool:
    """Whether ``batch`` is a list or a tuple of plain tensors."""
    return type(batch) in _FLAT and set(map(type, batch)) == _TENSORS


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tells the allocator that ``stream`` uses what is in ``batch``: its memory is not handed out again too early."""
    for item in _recordable(batch, set()):
        item.record_stream(stream)


def is_small(batch: Any) -> bool:
    """Whether ``batch`` is a tensor on the CPU, or a flat container of such, with a few kilobytes in all."""
    kind, size = type(batch), 0
    parts: Iterable[Any] = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
    for one in parts:
        if type(one) is not Tensor or not one.is_cpu or one.layout is not torch.strided:
            return False
        size += one.nbytes
    return size <= _SMALL


def lies_on_gpu(batch: Any) -> bool:
    """Whether anything in ``batch`` knows streams."""
    if type(batch) in (list, tuple):  # the usual form, in a tenth of the time
        for one in batch:
            if type(one) is not Tensor:
                break
            if one.is_cuda:
                return True
        else:
            return False
    return next(_recordable(batch, set()), None) is not None


def _recordable(item: Any, seen: set[int]) -> Iterator[Any]:
    """What in ``item`` knows streams: CUDA tensors, and objects with a ``record_stream`` of their own."""
    if isinstance(item, Tensor):
        if item.is_cuda:
            yield item
        return
    if isinstance(item, _PLAIN) or id(item) in seen:
        return
    seen.add(id(item))
    if callable(getattr(item, "record_stream", None)):
        yield item
        return
    for value in _held(item):
        yield from _recordable(value, seen)


def _held(item: Any) -> list[Any]:
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, Mapping):
        return list(item.values())
    if dataclasses.is_dataclass(item) or hasattr(item, "to"):
        return list(getattr(item, "__dict__", {}).values()) or [
            getattr(item, name) for name in getattr(item, "__slots__", ())
        ]
    return []
