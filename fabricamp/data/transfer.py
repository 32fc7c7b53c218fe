"""A batch and the tensors in it, whatever holds them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, type, type(None))


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Returns ``batch`` with every tensor in it on ``device``; ``batch`` itself where nothing has to move.

    Walks mappings, lists, tuples, namedtuples and dataclasses, whose types are kept, and calls ``to(device)`` of what
    else has it.  The host does not wait for a copy to a GPU; from pinned memory it runs beside the computation.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda" and batch.device.type == "cpu")
    if isinstance(batch, _PLAIN):
        return batch
    if callable(getattr(batch, "to", None)):
        moved = batch.to(device)
        return batch if moved is None else moved
    return _moved_container(batch, device)


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tells the allocator that ``stream`` uses what is in ``batch``: its memory is not handed out again too early."""
    for item in _recordable(batch, set()):
        item.record_stream(stream)


def _moved_container(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, list | tuple):
        return _moved_sequence(batch, device)
    if isinstance(batch, Mapping):
        return _moved_mapping(batch, device)
    if dataclasses.is_dataclass(batch):
        return _moved_dataclass(batch, device)
    return batch


def _moved_sequence(batch: list[Any] | tuple[Any, ...], device: torch.device) -> Any:
    values = [move_to_device(item, device) for item in batch]
    if all(new is old for new, old in zip(values, batch, strict=True)):
        return batch
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _moved_mapping(batch: Mapping[Any, Any], device: torch.device) -> Any:
    changed = _changed(dict(batch), device)
    if not isinstance(batch, MutableMapping):
        return type(batch)({**batch, **changed}) if changed else batch  # type: ignore[call-arg]
    return _with(batch, changed, lambda mapping, key, value: mapping.__setitem__(key, value))


def _moved_dataclass(batch: Any, device: torch.device) -> Any:
    values = {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    return _with(batch, _changed(values, device), object.__setattr__)


def _changed(values: dict[Any, Any], device: torch.device) -> dict[Any, Any]:
    moved = {key: move_to_device(value, device) for key, value in values.items()}
    return {key: value for key, value in moved.items() if value is not values[key]}


def _with(batch: Any, changed: dict[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """A shallow copy with the ``changed`` values: it keeps its type and what else it carries (a default factory)."""
    if not changed:
        return batch
    copied = copy.copy(batch)
    for key, value in changed.items():
        put(copied, key, value)
    return copied


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
