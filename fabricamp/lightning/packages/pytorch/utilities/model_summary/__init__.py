"""The table of a module's layers, and numbers as text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fabricamp.callbacks.model_summary import LayerSummary, summarize
from fabricamp.lightning import aliases

__path__ = aliases.path_of(__name__)

ModelSummary = summarize

PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]
UNKNOWN_SIZE = "?"
LEFTOVER_PARAMS_NAME = "other params"
NOT_APPLICABLE = "n/a"


def get_human_readable_count(number: int) -> str:
    """Returns a number in units of a thousand: ``get_human_readable_count(2e6)`` is "2.0 M"."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(PARAMETER_NUM_UNITS) - 1:
        value /= 1000
        unit += 1
    # At most three digits: one decimal place for values below 100.
    text = f"{int(value):,d}" if unit == 0 or value >= 100 else f"{int(value * 10) / 10:,.1f}"
    return f"{text} {PARAMETER_NUM_UNITS[unit]}"


def get_formatted_model_size(total_model_size: float) -> str:
    """Returns megabytes with three decimal places."""
    return f"{total_model_size:,.3f}"


def parse_batch_shape(batch: Any) -> Any:
    """Returns the shape of a tensor, or the shapes in a list; "?" for anything else."""
    if isinstance(batch, Tensor):
        return [*batch.shape]
    return [parse_batch_shape(part) for part in batch] if isinstance(batch, (list, tuple)) else UNKNOWN_SIZE


__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]
