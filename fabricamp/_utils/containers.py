"""Functions over nested mappings, lists, tuples, named tuples and data classes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

CONTAINERS = (Mapping, list, tuple)
"""The types that :func:`with_parts` looks into, besides data classes."""


def with_parts(value: object, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of ``value``, of the same type, with ``change`` applied to each item; ``value`` itself if none changes."""
    if isinstance(value, (list, tuple)):
        items = [change(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            result = copy.copy(value)
            result[:] = items
            return result
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return _with_items(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, change)
    return value


def _with_items(value: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    items = {key: change(item) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]  # an immutable mapping is built from a dict
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _with_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    result = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = change(old)
        if new is not old:
            if result is value:
                result = copy.copy(value)
            object.__setattr__(result, field.name, new)  # works for frozen classes, and does not run __init__ again
    return result


def own_containers(value: object) -> Any:
    """Returns OmegaConf's lists and mappings as Python's, any other value as it is; hydra's ``instantiate`` passes OmegaConf's."""
    if not type(value).__module__.startswith("omegaconf."):
        return value
    if isinstance(value, Mapping):
        return {key: own_containers(value[key]) for key in value}
    return [own_containers(item) for item in value] if isinstance(value, Sequence) else value


def tensors_within(value: object) -> Iterator[Tensor]:
    """Yields the tensors in ``value``, at any depth."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for part in parts:
        yield from tensors_within(part)


def batch_length(batch: object) -> int | None:
    """Returns the length of the first tensor in ``batch`` that has a dimension; 1 if none has one, None without tensors."""
    length = None
    for tensor in tensors_within(batch):
        if tensor.ndim:
            return tensor.shape[0]
        length = 1  # a temperature or a flag says nothing of the samples: a tensor after it may
    return length
