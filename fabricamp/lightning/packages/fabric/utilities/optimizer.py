"""Moves optimizers' states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from fabricamp.utilities import move_data_to_device


def _optimizers_to_device(optimizers: Iterable[Optimizer], device: Any) -> None:
    for optimizer in optimizers:
        _optimizer_to_device(optimizer, device)


def _optimizer_to_device(optimizer: Optimizer, device: Any) -> None:
    """Moves the states to a device, except ``step``, which torch keeps on the CPU."""
    for parameter, state in optimizer.state.items():
        moved = {key: value if key == "step" else move_data_to_device(value, device) for key, value in state.items()}
        optimizer.state[parameter] = moved
