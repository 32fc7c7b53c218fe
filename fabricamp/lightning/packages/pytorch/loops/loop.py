# Written by tools/write_aliases.py
"""Lightning's path to its class _Loop."""

from fabricamp.lightning.refused import Refused

__all__ = ["_Loop"]


class _Loop(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._Loop"
