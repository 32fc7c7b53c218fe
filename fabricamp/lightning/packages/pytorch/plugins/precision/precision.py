# Written by tools/write_aliases.py
"""Lightning's path to the base of precisions."""

from fabricamp.precision import Precision as Precision
