# Written by tools/write_aliases.py
"""Lightning's path to FSDPStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["FSDPStrategy"]


class FSDPStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.FSDPStrategy"
