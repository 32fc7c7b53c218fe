# Written by tools/write_aliases.py
"""Lightning's path to its base of enums."""

from fabricamp.lightning.packages.pytorch.utilities.enums import LightningEnum as LightningEnum
