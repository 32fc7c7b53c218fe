"""Types of logged values, for type hints."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fabricamp.lightning.refused import Refused

_VALUE = Any
_OUT_DICT = dict[str, Tensor]
_PBAR_DICT = dict[str, float]
_METRICS = dict[str, Any]


class _ResultCollection(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._ResultCollection"


class _ResultMetric(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "trainer.connectors._ResultMetric"
