# Written by tools/write_aliases.py
"""Lightning's path to MixedPrecision."""

from fabricamp.lightning.packages.pytorch.plugins.precision import MixedPrecision as MixedPrecision
