# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.accelerators``."""

import fabricamp.accelerators
from fabricamp.accelerators import *  # noqa: F403
from fabricamp.lightning.refused import Refused

__all__ = ["MPSAccelerator", "XLAAccelerator"]
__all__ += fabricamp.accelerators.__all__


class MPSAccelerator(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "accelerators.MPSAccelerator"


class XLAAccelerator(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "accelerators.XLAAccelerator"
