# Written by tools/write_aliases.py
"""Lightning's path to ModelParallelStrategy."""

from fabricamp.lightning.refused import Refused

__all__ = ["ModelParallelStrategy"]


class ModelParallelStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.ModelParallelStrategy"
