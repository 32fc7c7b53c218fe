# Written by tools/write_aliases.py
"""Lightning's path to ParallelStrategy."""

from fabricamp.lightning.refused import Refused

__all__ = ["ParallelStrategy"]


class ParallelStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.ParallelStrategy"
