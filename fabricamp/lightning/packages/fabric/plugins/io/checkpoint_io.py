# Written by tools/write_aliases.py
"""Lightning's path to CheckpointIO."""

from fabricamp.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
