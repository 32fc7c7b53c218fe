# Written by tools/write_aliases.py
"""Lightning's path to the CombinedLoader."""

from fabricamp.data import CombinedLoader as CombinedLoader
