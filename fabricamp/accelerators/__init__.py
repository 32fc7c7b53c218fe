"""Lightning's path to the classes for kinds of devices; ``trainer.accelerator`` is one of them."""

from __future__ import annotations

from types import ModuleType

from fabricamp.arguments.not_offered import part_of
from fabricamp.launch.devices import Accelerator, CPUAccelerator, CUDAAccelerator, find_usable_cuda_devices

__all__ = ["Accelerator", "CPUAccelerator", "CUDAAccelerator", "find_usable_cuda_devices"]


def __getattr__(name: str) -> ModuleType:
    return part_of(__name__, name, __all__)
