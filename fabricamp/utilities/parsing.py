"""Lightning's path to a dict whose keys are attributes."""

from fabricamp.hyperparameters import Hyperparameters as AttributeDict

__all__ = ["AttributeDict"]
