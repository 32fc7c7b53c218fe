"""Lightning's path to ``CUDAAccelerator``."""

from fabricamp.launch.devices import CUDAAccelerator as CUDAAccelerator
