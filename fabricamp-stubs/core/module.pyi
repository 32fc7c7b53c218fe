from fabricamp.module import TrainingModule as LightningModule

__all__ = ["LightningModule"]
