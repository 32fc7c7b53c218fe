"""Lightning's path to ``CUDAAccelerator``."""

from __future__ import annotations

from fabricamp.launch.accelerators import CUDAAccelerator

__all__ = ["CUDAAccelerator"]
