# Written by tools/write_aliases.py
"""Lightning's path to XLAAccelerator."""

from fabricamp.lightning.packages.pytorch.accelerators.xla import XLAAccelerator as XLAAccelerator
