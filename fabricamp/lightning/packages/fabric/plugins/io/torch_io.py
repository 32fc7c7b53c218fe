# Written by tools/write_aliases.py
"""Lightning's path to TorchCheckpointIO."""

from fabricamp.checkpoint.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
