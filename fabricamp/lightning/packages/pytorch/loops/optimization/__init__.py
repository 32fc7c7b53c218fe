# Written by tools/write_aliases.py
"""Lightning's path to its classes of steps."""

from fabricamp.lightning.refused import Refused

__all__ = ["_AutomaticOptimization", "_ManualOptimization"]


class _AutomaticOptimization(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._AutomaticOptimization"


class _ManualOptimization(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._ManualOptimization"
