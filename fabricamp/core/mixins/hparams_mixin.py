"""Lightning's path to ``save_hyperparameters``."""

from __future__ import annotations

from fabricamp.hyperparameters import HyperparametersMixin

__all__ = ["HyperparametersMixin"]
