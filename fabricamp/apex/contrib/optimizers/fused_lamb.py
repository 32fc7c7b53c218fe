"""The old FusedLAMB, which is that of ``apex.optimizers``."""

from __future__ import annotations

from fabricamp.apex.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
