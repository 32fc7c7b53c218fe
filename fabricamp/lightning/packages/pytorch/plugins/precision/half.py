# Written by tools/write_aliases.py
"""Lightning's path to HalfPrecision."""

from fabricamp.lightning.packages.pytorch.plugins.precision import HalfPrecision as HalfPrecision
