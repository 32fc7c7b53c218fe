# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.core``."""

from fabricamp.core import LightningDataModule as LightningDataModule
from fabricamp.core import LightningModule as LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
