"""The old FusedSGD, which is that of ``apex.optimizers``."""

from fabricamp.apex.optimizers import FusedSGD

__all__ = ["FusedSGD"]
