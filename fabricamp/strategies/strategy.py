"""Lightning's path to the base of strategies."""

from __future__ import annotations

from fabricamp.strategies.base import Strategy

__all__ = ["Strategy"]
