# Written by tools/write_aliases.py
"""Lightning's path to XLAPrecision."""

from fabricamp.lightning.packages.fabric.plugins.precision import XLAPrecision as XLAPrecision
