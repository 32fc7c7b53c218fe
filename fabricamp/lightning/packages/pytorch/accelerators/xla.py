# Written by tools/write_aliases.py
"""Lightning's path to XLAAccelerator."""

from fabricamp.lightning.refused import Refused

__all__ = ["XLAAccelerator"]


class XLAAccelerator(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "accelerators.XLAAccelerator"
