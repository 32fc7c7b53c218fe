# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.plugins.io``."""

from fabricamp.lightning.packages.fabric.plugins.io import CheckpointIO as CheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io import TorchCheckpointIO as TorchCheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io import XLACheckpointIO as XLACheckpointIO
from fabricamp.lightning.packages.pytorch.plugins.io.async_plugin import AsyncCheckpointIO as AsyncCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO", "XLACheckpointIO"]
