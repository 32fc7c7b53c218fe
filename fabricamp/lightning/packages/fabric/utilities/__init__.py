# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.utilities``."""

from fabricamp.lightning.packages.fabric.utilities.data import suggested_max_num_workers as suggested_max_num_workers
from fabricamp.lightning.packages.fabric.utilities.distributed import is_shared_filesystem as is_shared_filesystem
from fabricamp.lightning.packages.fabric.utilities.enums import LightningEnum as LightningEnum
from fabricamp.lightning.packages.fabric.utilities.throughput import Throughput as Throughput
from fabricamp.lightning.packages.fabric.utilities.throughput import ThroughputMonitor as ThroughputMonitor
from fabricamp.lightning.packages.fabric.utilities.warnings import (
    disable_possible_user_warnings as disable_possible_user_warnings,
)
from fabricamp.utilities import AttributeDict as AttributeDict
from fabricamp.utilities import measure_flops as measure_flops
from fabricamp.utilities import move_data_to_device as move_data_to_device
from fabricamp.utilities import rank_zero_deprecation as rank_zero_deprecation
from fabricamp.utilities import rank_zero_info as rank_zero_info
from fabricamp.utilities import rank_zero_only as rank_zero_only
from fabricamp.utilities import rank_zero_warn as rank_zero_warn

__all__ = [
    "AttributeDict",
    "LightningEnum",
    "Throughput",
    "ThroughputMonitor",
    "disable_possible_user_warnings",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "suggested_max_num_workers",
]
