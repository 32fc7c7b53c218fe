# Written by tools/write_aliases.py
"""Lightning's path to LitLogger."""

from fabricamp.lightning.refused import Refused

__all__ = ["LitLogger"]


class LitLogger(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loggers.LitLogger"
