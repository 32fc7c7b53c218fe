"""Lightning's path to ``CUDAAccelerator``."""

from fabricamp.launch.accelerators import CUDAAccelerator

__all__ = ["CUDAAccelerator"]
