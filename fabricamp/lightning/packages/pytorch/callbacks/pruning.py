# Written by tools/write_aliases.py
"""Lightning's path to ModelPruning."""

from fabricamp.lightning.refused import Refused

__all__ = ["ModelPruning"]


class ModelPruning(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "callbacks.ModelPruning"
