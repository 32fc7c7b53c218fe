# Written by tools/write_aliases.py
"""Lightning's path to MPSAccelerator."""

from fabricamp.lightning.refused import Refused

__all__ = ["MPSAccelerator"]


class MPSAccelerator(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "accelerators.MPSAccelerator"
