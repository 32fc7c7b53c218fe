# Written by tools/write_aliases.py
"""Lightning's path to its class _TrainingEpochLoop."""

from fabricamp.lightning.refused import Refused

__all__ = ["_TrainingEpochLoop"]


class _TrainingEpochLoop(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._TrainingEpochLoop"
