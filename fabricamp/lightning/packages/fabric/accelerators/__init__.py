# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.accelerators``."""

from fabricamp.accelerators import Accelerator as Accelerator
from fabricamp.accelerators import CPUAccelerator as CPUAccelerator
from fabricamp.accelerators import CUDAAccelerator as CUDAAccelerator
from fabricamp.accelerators import find_usable_cuda_devices as find_usable_cuda_devices
from fabricamp.lightning.packages.fabric.accelerators.registry import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY
from fabricamp.lightning.packages.pytorch.accelerators.mps import MPSAccelerator as MPSAccelerator
from fabricamp.lightning.packages.pytorch.accelerators.xla import XLAAccelerator as XLAAccelerator

__all__ = [
    "ACCELERATOR_REGISTRY",
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
]
