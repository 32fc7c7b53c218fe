# Written by tools/write_aliases.py
"""Lightning's path to FSDPPrecision."""

from fabricamp.lightning.packages.pytorch.plugins.precision import FSDPPrecision as FSDPPrecision
