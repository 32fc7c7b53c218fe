"""Lightning's path to ``Accelerator``."""

from __future__ import annotations

from fabricamp.launch.accelerators import Accelerator

__all__ = ["Accelerator"]
