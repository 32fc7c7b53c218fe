from fabricamp.engine.optimizer_setup import ManagedOptimizer as LightningOptimizer

__all__ = ["LightningOptimizer"]
