# Written by tools/write_aliases.py
"""Lightning's path to XLAStrategy."""

from fabricamp.lightning.refused import Refused

__all__ = ["XLAStrategy"]


class XLAStrategy(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.XLAStrategy"
