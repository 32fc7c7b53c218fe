# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.utilities``."""

from fabricamp.lightning.packages.fabric.utilities.data import suggested_max_num_workers as suggested_max_num_workers
from fabricamp.lightning.packages.fabric.utilities.distributed import is_shared_filesystem as is_shared_filesystem
from fabricamp.lightning.packages.fabric.utilities.warnings import (
    disable_possible_user_warnings as disable_possible_user_warnings,
)
from fabricamp.lightning.packages.pytorch.utilities.enums import GradClipAlgorithmType as GradClipAlgorithmType
from fabricamp.lightning.packages.pytorch.utilities.enums import LightningEnum as LightningEnum
from fabricamp.lightning.packages.pytorch.utilities.parameter_tying import (
    find_shared_parameters as find_shared_parameters,
)
from fabricamp.lightning.packages.pytorch.utilities.parameter_tying import (
    set_shared_parameters as set_shared_parameters,
)
from fabricamp.lightning.packages.pytorch.utilities.parsing import is_picklable as is_picklable
from fabricamp.utilities import AttributeDict as AttributeDict
from fabricamp.utilities import CombinedLoader as CombinedLoader
from fabricamp.utilities import grad_norm as grad_norm
from fabricamp.utilities import measure_flops as measure_flops
from fabricamp.utilities import move_data_to_device as move_data_to_device
from fabricamp.utilities import rank_zero_debug as rank_zero_debug
from fabricamp.utilities import rank_zero_deprecation as rank_zero_deprecation
from fabricamp.utilities import rank_zero_info as rank_zero_info
from fabricamp.utilities import rank_zero_only as rank_zero_only
from fabricamp.utilities import rank_zero_warn as rank_zero_warn

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "GradClipAlgorithmType",
    "LightningEnum",
    "disable_possible_user_warnings",
    "find_shared_parameters",
    "grad_norm",
    "is_picklable",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_shared_parameters",
    "suggested_max_num_workers",
]
