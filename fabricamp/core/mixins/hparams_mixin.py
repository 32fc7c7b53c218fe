"""Lightning's path to ``save_hyperparameters``."""

from fabricamp.hyperparameters import HyperparametersMixin

__all__ = ["HyperparametersMixin"]
