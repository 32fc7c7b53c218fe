"""The old FusedLAMB, which is that of ``apex.optimizers``."""

from fabricamp.apex.optimizers import FusedLAMB as FusedLAMB
