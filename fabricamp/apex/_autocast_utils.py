"""Casts to autocast's dtype, for functions that autocast does not cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Returns ``args`` with floating tensors, also in lists and dicts, cast to autocast's dtype; unchanged if autocast is off."""
    return tuple(map(_cast, args))


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor):
        kind = value.device.type
        casts = value.is_floating_point() and value.dtype is not torch.float64 and torch.is_autocast_enabled(kind)
        return value.to(torch.get_autocast_dtype(kind)) if casts else value
    if isinstance(value, dict):
        return {key: _cast(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_cast(entry) for entry in value])
    return value
