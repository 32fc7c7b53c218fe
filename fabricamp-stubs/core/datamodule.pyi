from fabricamp.data import DataModule as LightningDataModule

__all__ = ["LightningDataModule"]
