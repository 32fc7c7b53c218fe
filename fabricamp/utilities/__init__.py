"""Lightning's helpers: functions for rank 0 only, types, gradient norms, moving data, seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.checkpoint.hyperparameters import Hyperparameters
from fabricamp.data import CombinedLoader as CombinedLoader
from fabricamp.data import move_to_device
from fabricamp.utilities.grads import grad_norm as grad_norm
from fabricamp.utilities.rank_zero import rank_zero_debug as rank_zero_debug
from fabricamp.utilities.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from fabricamp.utilities.rank_zero import rank_zero_info as rank_zero_info
from fabricamp.utilities.rank_zero import rank_zero_only as rank_zero_only
from fabricamp.utilities.rank_zero import rank_zero_warn as rank_zero_warn
from fabricamp.utilities.throughput import measure_flops as measure_flops

if TYPE_CHECKING:
    import torch

AttributeDict = Hyperparameters


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Returns the tensors of ``batch`` (in lists, dicts, dataclasses and so on) on ``device``.

    >>> move_data_to_device({"x": torch.zeros(2)}, "cpu")["x"].device
    device(type='cpu')
    """
    import torch

    return move_to_device(batch, torch.device(device))


def __getattr__(name: str) -> object:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name)
