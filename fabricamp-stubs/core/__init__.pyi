from fabricamp.data import DataModule as LightningDataModule
from fabricamp.module import TrainingModule as LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
