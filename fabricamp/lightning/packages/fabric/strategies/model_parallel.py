# Written by tools/write_aliases.py
"""Lightning's path to ModelParallelStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["ModelParallelStrategy"]


class ModelParallelStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.ModelParallelStrategy"
