"""Lightning's path to the CombinedLoader."""

from fabricamp.data import CombinedLoader as CombinedLoader
