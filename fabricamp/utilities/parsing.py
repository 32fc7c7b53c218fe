"""Lightning's path to a dict whose keys are attributes."""

from __future__ import annotations

from fabricamp.hyperparameters import Hyperparameters as AttributeDict

__all__ = ["AttributeDict"]
