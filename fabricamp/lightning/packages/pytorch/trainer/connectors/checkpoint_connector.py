# Written by tools/write_aliases.py
"""Lightning's path to its class _CheckpointConnector."""

from fabricamp.lightning.refused import Refused

__all__ = ["_CheckpointConnector"]


class _CheckpointConnector(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._CheckpointConnector"
