"""Lightning's path to ``CUDAAccelerator``."""

from fabricamp.launch.accelerators import CUDAAccelerator as CUDAAccelerator
