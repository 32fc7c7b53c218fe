# Written by tools/write_aliases.py
"""Lightning's path to measure_flops, and to Fabric's monitors."""

from fabricamp.lightning.refused import Refused
from fabricamp.utilities import measure_flops as measure_flops

__all__ = ["Throughput", "ThroughputMonitor", "measure_flops"]


class Throughput(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.Throughput"


class ThroughputMonitor(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.ThroughputMonitor"
