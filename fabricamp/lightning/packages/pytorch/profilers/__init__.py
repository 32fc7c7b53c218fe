# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.profilers``."""

import fabricamp.profilers
from fabricamp.lightning.packages.pytorch.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from fabricamp.lightning.packages.pytorch.profilers.xla import XLAProfiler as XLAProfiler
from fabricamp.profilers import *  # noqa: F403

__all__ = ["AdvancedProfiler", "XLAProfiler"]
__all__ += fabricamp.profilers.__all__
