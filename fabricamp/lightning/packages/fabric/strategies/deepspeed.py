# Written by tools/write_aliases.py
"""Lightning's path to DeepSpeedStrategy of Fabric."""

from fabricamp.lightning.refused import Refused

__all__ = ["DeepSpeedStrategy"]


class DeepSpeedStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.DeepSpeedStrategy"
