# Written by tools/write_aliases.py
"""Lightning's path to DeepSpeedStrategy."""

from fabricamp.lightning.refused import Refused

__all__ = ["DeepSpeedStrategy"]


class DeepSpeedStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.DeepSpeedStrategy"
