"""Lightning's path to the DataModule."""

from __future__ import annotations

from fabricamp.data import DataModule as LightningDataModule

__all__ = ["LightningDataModule"]
