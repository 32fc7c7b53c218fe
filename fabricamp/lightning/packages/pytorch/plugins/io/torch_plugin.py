# Written by tools/write_aliases.py
"""Lightning's path to TorchCheckpointIO."""

from fabricamp.lightning.packages.fabric.plugins.io import TorchCheckpointIO as TorchCheckpointIO
