# Written by tools/write_aliases.py
"""Lightning's path to DoublePrecision."""

from fabricamp.lightning.packages.fabric.plugins.precision import DoublePrecision as DoublePrecision
