"""Lightning's path to the CombinedLoader."""

from __future__ import annotations

from fabricamp.data import CombinedLoader

__all__ = ["CombinedLoader"]
