# Written by tools/write_aliases.py
"""Lightning's path to AsyncCheckpointIO."""

from fabricamp.lightning.refused import Refused

__all__ = ["AsyncCheckpointIO"]


class AsyncCheckpointIO(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.io.AsyncCheckpointIO"
