"""Lightning's path to the module."""

from __future__ import annotations

from fabricamp.module import TrainingModule as LightningModule

__all__ = ["LightningModule"]
