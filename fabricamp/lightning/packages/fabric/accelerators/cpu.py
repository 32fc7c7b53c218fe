# Written by tools/write_aliases.py
"""Lightning's path to CPUAccelerator."""

from fabricamp.accelerators import CPUAccelerator as CPUAccelerator
