# Written by tools/write_aliases.py
"""Lightning's path to Accelerator."""

from fabricamp.accelerators import Accelerator as Accelerator
