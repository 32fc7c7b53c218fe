# Written by tools/write_aliases.py
"""Lightning's path to the base of callbacks."""

from fabricamp.callbacks.base import Callback as Callback
