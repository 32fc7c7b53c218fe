# Written by tools/write_aliases.py
"""Lightning's path to DeepSpeedPrecision."""

from fabricamp.lightning.packages.pytorch.plugins.precision import DeepSpeedPrecision as DeepSpeedPrecision
