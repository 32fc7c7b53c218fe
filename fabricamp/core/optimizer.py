"""Lightning's path to what ``self.optimizers()`` gives."""

from fabricamp.engine.optimizer_setup import ManagedOptimizer as LightningOptimizer

__all__ = ["LightningOptimizer"]
