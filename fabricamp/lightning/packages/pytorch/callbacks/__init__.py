# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.callbacks``."""

import fabricamp.callbacks
from fabricamp.callbacks import *  # noqa: F403
from fabricamp.lightning.packages.pytorch.callbacks.pruning import ModelPruning as ModelPruning
from fabricamp.lightning.packages.pytorch.callbacks.spike import SpikeDetection as SpikeDetection

__all__ = ["ModelPruning", "SpikeDetection"]
__all__ += fabricamp.callbacks.__all__
