# Written by tools/write_aliases.py
"""Lightning's path to TorchCheckpointIO."""

from fabricamp.lightning.refused import Refused

__all__ = ["TorchCheckpointIO"]


class TorchCheckpointIO(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.io.TorchCheckpointIO"
