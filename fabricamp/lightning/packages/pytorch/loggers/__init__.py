# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.loggers``."""

import fabricamp.loggers
from fabricamp.lightning.packages.pytorch.loggers.litlogger import LitLogger as LitLogger
from fabricamp.lightning.packages.pytorch.loggers.neptune import NeptuneLogger as NeptuneLogger
from fabricamp.loggers import *  # noqa: F403

__all__ = ["LitLogger", "NeptuneLogger"]
__all__ += fabricamp.loggers.__all__
