# Written by tools/write_aliases.py
"""Lightning's path to its class _EvaluationLoop."""

from fabricamp.lightning.refused import Refused

__all__ = ["_EvaluationLoop"]


class _EvaluationLoop(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "loops._EvaluationLoop"
