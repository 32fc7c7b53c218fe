"""The old FusedLAMB: the class of ``apex.optimizers``."""

from fabricamp.apex.optimizers import FusedLAMB as FusedLAMB
