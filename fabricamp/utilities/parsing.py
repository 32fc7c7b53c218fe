"""Lightning's path to a dict with its keys as attributes."""

from fabricamp.checkpoint.hyperparameters import Hyperparameters as AttributeDict

__all__ = ["AttributeDict"]
