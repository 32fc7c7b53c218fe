# Written by tools/write_aliases.py
"""Lightning's path to its class _SignalConnector."""

from fabricamp.lightning.refused import Refused

__all__ = ["_SignalConnector"]


class _SignalConnector(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._SignalConnector"
