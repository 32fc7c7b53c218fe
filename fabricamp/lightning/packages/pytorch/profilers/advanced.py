# Written by tools/write_aliases.py
"""Lightning's path to AdvancedProfiler."""

from fabricamp.lightning.refused import Refused

__all__ = ["AdvancedProfiler"]


class AdvancedProfiler(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "profilers.AdvancedProfiler"
