# Written by tools/write_aliases.py
"""Lightning's path to SingleDeviceStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["SingleDeviceStrategy"]


class SingleDeviceStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.SingleDeviceStrategy"
