"""Lightning's path to ``CPUAccelerator``."""

from fabricamp.launch.accelerators import CPUAccelerator as CPUAccelerator
