# Written by tools/write_aliases.py
"""Lightning's path to Strategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["Strategy"]


class Strategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.Strategy"
