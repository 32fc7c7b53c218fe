# Written by tools/write_aliases.py
"""Lightning's path to SpikeDetection."""

from fabricamp.lightning.refused import Refused

__all__ = ["SpikeDetection"]


class SpikeDetection(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "callbacks.SpikeDetection"
