# Written by tools/write_aliases.py
"""Lightning's path to the base of plug-ins around another."""

from fabricamp.checkpoint.checkpoint_io import WrappingCheckpointIO as _WrappingCheckpointIO

__all__ = ["_WrappingCheckpointIO"]
