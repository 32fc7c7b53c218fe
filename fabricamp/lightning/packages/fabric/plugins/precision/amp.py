# Written by tools/write_aliases.py
"""Lightning's path to MixedPrecision."""

from fabricamp.lightning.packages.fabric.plugins.precision import MixedPrecision as MixedPrecision
