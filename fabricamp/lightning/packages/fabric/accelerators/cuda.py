"""Counts and finds CUDA GPUs."""

from __future__ import annotations

import torch

from fabricamp.launch.devices import CUDAAccelerator as CUDAAccelerator
from fabricamp.launch.devices import find_usable_cuda_devices as find_usable_cuda_devices


def num_cuda_devices() -> int:
    """Returns the number of GPUs that torch sees, without initialising CUDA."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Returns whether torch sees a GPU, and can use it."""
    return torch.cuda.is_available()


def _get_all_visible_cuda_devices() -> list[int]:
    return list(range(num_cuda_devices()))
