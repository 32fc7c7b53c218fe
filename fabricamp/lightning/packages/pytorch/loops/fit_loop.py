# Written by tools/write_aliases.py
"""Lightning's path to its class _FitLoop."""

from fabricamp.lightning.refused import Refused

__all__ = ["_FitLoop"]


class _FitLoop(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._FitLoop"
