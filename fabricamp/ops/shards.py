"""Tensors of which each rank holds a part (torch's DTensors), and the memory that this rank has of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def is_shard(value: object) -> bool:
    """Whether ``value`` is a tensor of which this rank holds a part; nothing is imported to know."""
    kind = type(value)
    return kind is not Tensor and kind is not Parameter and hasattr(kind, "to_local") and isinstance(value, Tensor)


def local(tensor: Any) -> Any:
    """Returns the part of ``tensor`` that this rank holds, always the same object; anything else as it is."""
    return tensor._local_tensor if is_shard(tensor) else tensor


def device_of(tensor: Any) -> torch.device:
    """Returns where ``tensor`` is computed with: that of its mesh, where its parts wait in host memory."""
    own: torch.device = tensor.device
    if own.type == "cpu" and is_shard(tensor) and tensor.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return own


def local_gradient(parameter: Any) -> Any:
    """Returns this rank's part of a parameter's ``.grad``; None where there is none, or it has no elements here."""
    gradient = parameter.grad
    if gradient is None:
        return None
    own = getattr(gradient, "_local_tensor", gradient)
    return own if own is gradient or own.numel() else None
