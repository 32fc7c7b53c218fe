# Written by tools/write_aliases.py
"""Lightning's path to NeptuneLogger."""

from fabricamp.lightning.refused import Refused

__all__ = ["NeptuneLogger"]


class NeptuneLogger(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loggers.NeptuneLogger"
