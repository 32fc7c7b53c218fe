"""The old FusedSGD, which is that of ``apex.optimizers``."""

from fabricamp.apex.optimizers import FusedSGD as FusedSGD
