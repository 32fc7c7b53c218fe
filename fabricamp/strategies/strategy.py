"""Lightning's path to the base of strategies."""

from fabricamp.strategies.base import Strategy

__all__ = ["Strategy"]
