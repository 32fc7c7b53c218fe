# Written by tools/write_aliases.py
"""Lightning's path to DDPStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["DDPStrategy"]


class DDPStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.DDPStrategy"
