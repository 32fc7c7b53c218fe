"""When a backward through what a forward returned begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def on_backward(output: Any, run: Callable[[], None]) -> bool:
    """Lets ``run`` be called as a backward through ``output`` begins; returns whether a tensor was found in it for that."""
    found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]

    def hook(_: Tensor) -> None:
        run()

    for tensor in found:
        tensor.register_hook(hook)
    return bool(found)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples, mappings and data classes."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
