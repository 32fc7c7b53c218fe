"""Moves and converts the tensors of nested containers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fabricamp.utilities import move_data_to_device as move_data_to_device


def convert_to_tensors(data: Any, device: Any) -> Any:
    """Returns ``data`` on ``device``, with tensors for flags (uint8), integers (int32), floats (fp32) and arrays."""
    # bool comes first, because a bool is an int to isinstance; as uint8, because NCCL does not sum torch.bool.
    for kind, dtype in ((bool, torch.uint8), (int, torch.int), (float, torch.float)):
        data = apply_to_collection(data, kind, functools.partial(torch.tensor, dtype=dtype, device=device))
    data = apply_to_collection(data, np.ndarray, lambda array: torch.from_numpy(array).to(device))
    return move_data_to_device(data, device)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Returns ``data`` with numbers in place of tensors; raises ValueError for a tensor of several elements."""

    def number(value: Tensor) -> float:
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not one number; give tensors of one element")
        return value.item()

    return apply_to_collection(data, Tensor, number)
