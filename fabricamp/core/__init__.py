"""Lightning's names for what a user subclasses; docs/from-lightning.md has the table of such names."""

from fabricamp.core.datamodule import LightningDataModule
from fabricamp.core.module import LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
