# Written by tools/write_aliases.py
"""Lightning's path to its classes of synchronized layers."""

from fabricamp.lightning.refused import Refused

__all__ = ["LayerSync", "TorchSyncBatchNorm"]


class LayerSync(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.LayerSync"


class TorchSyncBatchNorm(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.TorchSyncBatchNorm"
