"""The old FusedSGD, which is that of ``apex.optimizers``."""

from __future__ import annotations

from fabricamp.apex.optimizers import FusedSGD

__all__ = ["FusedSGD"]
