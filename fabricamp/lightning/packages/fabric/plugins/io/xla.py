# Written by tools/write_aliases.py
"""Lightning's path to XLACheckpointIO."""

from fabricamp.lightning.refused import Refused

__all__ = ["XLACheckpointIO"]


class XLACheckpointIO(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.io.XLACheckpointIO"
