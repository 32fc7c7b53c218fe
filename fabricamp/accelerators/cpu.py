"""Lightning's path to ``CPUAccelerator``."""

from fabricamp.launch.accelerators import CPUAccelerator

__all__ = ["CPUAccelerator"]
