"""Lightning's helpers: what happens on rank 0 only, types, gradient norms, moving data, seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.data import move_to_device
from fabricamp.utilities.combined_loader import CombinedLoader
from fabricamp.utilities.grads import grad_norm
from fabricamp.utilities.parsing import AttributeDict
from fabricamp.utilities.rank_zero import (
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from fabricamp.utilities.throughput import measure_flops

if TYPE_CHECKING:
    import torch

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "grad_norm",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Returns the tensors of ``batch`` (in lists, dicts, dataclasses and so on) on ``device``.

    >>> move_data_to_device({"x": torch.zeros(2)}, "cpu")["x"].device
    device(type='cpu')
    """
    import torch

    return move_to_device(batch, torch.device(device))
