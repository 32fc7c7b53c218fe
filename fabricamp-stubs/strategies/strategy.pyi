from fabricamp.strategies.base import Strategy as Strategy

__all__ = ["Strategy"]
