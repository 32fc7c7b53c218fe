# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.utilities``."""

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
    "grad_norm",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]
