"""Lightning's path to the CombinedLoader."""

from fabricamp.data import CombinedLoader

__all__ = ["CombinedLoader"]
