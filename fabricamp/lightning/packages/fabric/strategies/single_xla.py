# Written by tools/write_aliases.py
"""Lightning's path to SingleDeviceXLAStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["SingleDeviceXLAStrategy"]


class SingleDeviceXLAStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.SingleDeviceXLAStrategy"
