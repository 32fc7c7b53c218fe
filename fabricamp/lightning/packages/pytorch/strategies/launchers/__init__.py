# Written by tools/write_aliases.py
"""Lightning's path to its launchers."""

from fabricamp.lightning.refused import Refused

__all__ = ["_MultiProcessingLauncher", "_SubprocessScriptLauncher", "_XLALauncher"]


class _MultiProcessingLauncher(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.launchers._MultiProcessingLauncher"


class _SubprocessScriptLauncher(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.launchers._SubprocessScriptLauncher"


class _XLALauncher(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "strategies.launchers._XLALauncher"
