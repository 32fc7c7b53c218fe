# Written by tools/write_aliases.py
"""Lightning's path to FSDPStrategy."""

from fabricamp.lightning.refused import Refused

__all__ = ["FSDPStrategy"]


class FSDPStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.FSDPStrategy"
