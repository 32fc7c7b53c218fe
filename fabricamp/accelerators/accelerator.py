"""Lightning's path to ``Accelerator``."""

from fabricamp.launch.accelerators import Accelerator

__all__ = ["Accelerator"]
