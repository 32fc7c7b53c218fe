"""Lightning's import path of the base class of strategies."""

from fabricamp.strategies.base import Strategy as Strategy

__all__ = ["Strategy"]
