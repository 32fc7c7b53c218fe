"""Lightning's path to the class of the objects that ``self.optimizers()`` returns."""

from fabricamp.engine.optimizer_setup import ManagedOptimizer as LightningOptimizer

__all__ = ["LightningOptimizer"]
