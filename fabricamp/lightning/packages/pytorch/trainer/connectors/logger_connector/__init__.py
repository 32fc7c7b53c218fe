# Written by tools/write_aliases.py
"""Lightning's path to its class _LoggerConnector."""

from fabricamp.lightning.refused import Refused

__all__ = ["_LoggerConnector"]


class _LoggerConnector(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._LoggerConnector"
