# Written by tools/write_aliases.py
"""Lightning's path to CheckpointIO."""

from fabricamp.lightning.packages.fabric.plugins.io import CheckpointIO as CheckpointIO
