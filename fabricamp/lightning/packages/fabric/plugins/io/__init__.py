# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.plugins.io``."""

from fabricamp.lightning.packages.fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io.torch_io import TorchCheckpointIO as TorchCheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io.xla import XLACheckpointIO as XLACheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO", "XLACheckpointIO"]
