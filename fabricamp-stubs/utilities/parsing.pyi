from fabricamp.checkpoint.hyperparameters import Hyperparameters as AttributeDict

__all__ = ["AttributeDict"]
