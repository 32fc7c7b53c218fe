# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.serve``."""

from fabricamp.lightning.refused import Refused

__all__ = ["ServableModule", "ServableModuleValidator"]


class ServableModule(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "serve.ServableModule"


class ServableModuleValidator(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "serve.ServableModuleValidator"
