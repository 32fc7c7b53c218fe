# Written by tools/write_aliases.py
"""Lightning's path to its class _CallbackConnector."""

from fabricamp.lightning.refused import Refused

__all__ = ["_CallbackConnector"]


class _CallbackConnector(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._CallbackConnector"
