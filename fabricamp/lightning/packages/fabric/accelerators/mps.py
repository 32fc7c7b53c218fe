# Written by tools/write_aliases.py
"""Lightning's path to MPSAccelerator."""

from fabricamp.lightning.packages.pytorch.accelerators.mps import MPSAccelerator as MPSAccelerator
