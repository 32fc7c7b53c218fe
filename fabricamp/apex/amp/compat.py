"""Checks of tensors that apex offers scripts."""

from __future__ import annotations

from typing import Any

import torch


def is_tensor_like(x: Any) -> bool:
    """Returns whether ``x`` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    """Returns whether ``x`` is a floating tensor."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def scalar_python_val(x: torch.Tensor) -> float:
    """Returns the value of a one-element tensor; waits for the device."""
    return x.item()
