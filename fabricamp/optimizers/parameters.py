"""The parameters of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def owned_parameters(optimizer: Optimizer) -> list[Any]:
    """Returns every tensor that ``optimizer`` updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
