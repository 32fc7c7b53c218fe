# Written by tools/write_aliases.py
"""Lightning's path to XLAFSDPStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.XLAFSDPStrategy"
