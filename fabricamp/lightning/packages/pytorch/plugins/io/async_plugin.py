# Written by tools/write_aliases.py
"""Lightning's path to AsyncCheckpointIO."""

from fabricamp.checkpoint.checkpoint_io import AsyncCheckpointIO as AsyncCheckpointIO
