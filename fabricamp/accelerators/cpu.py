"""Lightning's path to ``CPUAccelerator``."""

from __future__ import annotations

from fabricamp.launch.accelerators import CPUAccelerator

__all__ = ["CPUAccelerator"]
