# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.accelerators``."""

import fabricamp.accelerators
from fabricamp.accelerators import *  # noqa: F403
from fabricamp.lightning.packages.fabric.accelerators.registry import ACCELERATOR_REGISTRY as AcceleratorRegistry
from fabricamp.lightning.packages.pytorch.accelerators.mps import MPSAccelerator as MPSAccelerator
from fabricamp.lightning.packages.pytorch.accelerators.xla import XLAAccelerator as XLAAccelerator

__all__ = ["AcceleratorRegistry", "MPSAccelerator", "XLAAccelerator"]
__all__ += fabricamp.accelerators.__all__
