# Written by tools/write_aliases.py
"""Lightning's path to its class _PredictionLoop."""

from fabricamp.lightning.refused import Refused

__all__ = ["_PredictionLoop"]


class _PredictionLoop(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._PredictionLoop"
