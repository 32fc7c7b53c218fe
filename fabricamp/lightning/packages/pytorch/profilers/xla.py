# Written by tools/write_aliases.py
"""Lightning's path to XLAProfiler."""

from fabricamp.lightning.refused import Refused

__all__ = ["XLAProfiler"]


class XLAProfiler(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "profilers.XLAProfiler"
