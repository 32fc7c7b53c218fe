"""Lightning's path to ``CPUAccelerator``."""

from fabricamp.launch.devices import CPUAccelerator as CPUAccelerator
