# Written by tools/write_aliases.py
"""Lightning's path to its class _DataConnector."""

from fabricamp.lightning.refused import Refused

__all__ = ["_DataConnector"]


class _DataConnector(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._DataConnector"
