"""Format numbers of fabricamp's own checkpoints; converts earlier formats to the current one on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp._utils.types import StateDict

FORMAT: Final = 3
"""The current format.  A change of the layout raises this number and adds a step to :data:`_STEPS`."""

FIRST: Final = 2
"""The earliest format that is read: that of version 0.2.0."""

_POSITION = "data.position.*"
_METRICS = "loops.fit.metrics.*"
_RENAMED: Final = (
    ("loops.fit", {"stop": "stop_reason", "closed": "epoch_ended", "objects": "torchmetrics"}),
    ("loops.fit", {"ended": "metrics_at_end", "ended_logs": "loggers_at_end"}),
    ("loops.fit.metrics_at_end.*", {"given": "user_entries"}),
    ("loops.fit.torchmetrics.*.*", {"updates": "update_count"}),
    ("loops.fit", {"window": "accumulation"}),
    ("loops.fit.accumulation", {"held": "params_with_grad"}),
    (_METRICS, {"given": "user_entries"}),
    (f"{_METRICS}.table", {"cells": "slots"}),
    (f"{_METRICS}.table.slots.*", {"number": "host_value", "sent": "flushed_weight", "object": "metric_attribute"}),
    (f"{_METRICS}.pending.*", {"rows": "ranks"}),
    (f"{_METRICS}.pending.*.ranks.*", {"numbers": "host_values", "device": "device_values"}),
    (_POSITION, {"places": "positions", "last": "is_over", "again": "earlier_pass", "begun": "at_pass_start"}),
    (_POSITION, {"drawn": "rng_states", "drawn_ahead": "rng_states_ahead", "ended": "at_limit"}),
    (f"{_POSITION}.at_pass_start", {"again": "earlier_pass"}),
    (f"{_POSITION}.orders.*", {"apart": "separate"}),
    (f"{_POSITION}.positions.*", {"drawn": "rng_states", "groups": "batches_of_all_ranks"}),
    (f"{_POSITION}.at_limit", {"places": "positions", "drawn": "rng_states"}),
    (f"{_POSITION}.at_limit.positions.*", {"drawn": "rng_states", "groups": "batches_of_all_ranks"}),
)
"""The keys that format 3 renamed, except the loss scaler's, by the dotted path of their dict: ``*`` is any key or index.

Rows are applied in this order, so a path has the names that the rows above it gave.
"""

_OF_SCALER: Final = {
    "window": "step_state",
    "windows": "steps",
    "known": "last_status",
    "at_floor": "steps_at_min_scale",
    "sticky": "keep_skipping",
}
_OF_SCALE: Final = {"first_window": "first_step"}


def upgraded(state: StateDict, path: str) -> StateDict:
    """Returns ``state``, read from ``path``, in the current format; files of other libraries are returned unchanged.

    Raises :class:`CheckpointError` if its format is not read here, or if its layout does not match its format number.
    """
    if "fabricamp_version" not in state:
        return state
    written = state.get("format", 0)
    if type(written) is not int or not 0 <= written <= FORMAT:
        raise CheckpointError(
            f"{path} has format {written!r:.100} and was written by fabricamp {state['fabricamp_version']!s:.100}; this version "
            f"reads formats up to {FORMAT}: install the one that wrote it, or a later one"
        )
    if written < FIRST:
        raise CheckpointError(
            f"{path} has format {written}, which fabricamp 0.1.0 wrote and 0.2.0 reads; this version reads formats {FIRST} to "
            f"{FORMAT}: resume from it with fabricamp 0.2.0, and use a checkpoint that this run writes"
        )
    try:
        for step in _STEPS[written - FIRST :]:
            step(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not have the layout of format {written} ({type(error).__name__}: {error!s:.300}); use an older one"
        ) from None
    state["format"] = FORMAT
    return state


def _rename_keys(state: StateDict) -> None:
    """Converts format 2: the same values under other keys.

    A value that has another layout stays as it is: it is a plug-in's own, or the section that restores it raises.
    On disk a folder's tensors keep the names under which they were written; ``renamed`` beside their files has these.
    """
    for path, names in _RENAMED:
        for values in _dicts_at(state, path.split(".")):
            renamed = _renamed(values, names)
            values.clear()
            values.update(renamed)
    for shards in _dicts_at(state, ["shards"]):
        shards["renamed"] = {"loops/fit/accumulation/": "loops/fit/window/"}
    for amp in _dicts_at(state, ["amp"]):
        scaler = amp.get("scaler")
        if isinstance(scaler, dict) and scaler.keys() >= {"window", "windows", "scalers", "ring", "known"}:
            amp["scaler"] = renamed = _renamed(scaler, _OF_SCALER)
            renamed["step_state"] = _renamed(renamed["step_state"], _OF_SCALE)
            renamed["scalers"] = [_renamed(scale, _OF_SCALE) for scale in renamed["scalers"]]


def _dicts_at(value: object, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the dicts at ``path`` within ``value``."""
    if not path:
        if isinstance(value, dict):
            yield value
        return
    key, *rest = path
    inner: list[Any] = []
    if isinstance(value, dict) and key == "*":
        inner = list(value.values())
    elif isinstance(value, list) and key == "*":
        inner = value
    elif isinstance(value, dict) and key in value:
        inner = [value[key]]
    for part in inner:
        yield from _dicts_at(part, rest)


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


_STEPS: Final = (_rename_keys,)
