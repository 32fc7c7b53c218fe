# Written by tools/write_aliases.py
"""Lightning's path to DataParallelStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.DataParallelStrategy"
