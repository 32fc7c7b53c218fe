"""The old FusedSGD: the class of ``apex.optimizers``."""

from fabricamp.apex.optimizers import FusedSGD as FusedSGD
