"""Format numbers of fabricamp's own checkpoints; converts earlier formats to the current one on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp._utils.types import StateDict

FORMAT: Final = 3
"""The current format.  A change of the layout raises this number and adds a step to :data:`_STEPS`."""

_VERDICT = ("applied", "scale", "loss", "applied_steps", "skipped_steps", "ends_run")
_PUBLISHED = ("key", "plain_key", "per_step", "mode", "prog_bar", "logger", "sync_dist", "loader")
_ROW = ("published", "numbers", "weights", "device")

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


def upgraded(state: StateDict, path: str) -> StateDict:
    """Returns ``state``, read from ``path``, in the current format; files of other libraries are returned unchanged.

    Raises :class:`CheckpointError` if a later version wrote it, or if its layout does not match its format number.
    """
    if "fabricamp_version" not in state:
        return state
    written = state.get("format", 0)
    if type(written) is not int or not 0 <= written <= FORMAT:
        raise CheckpointError(
            f"{path} has format {written!r:.100} and was written by fabricamp {state['fabricamp_version']!s:.100}; this version "
            f"reads formats up to {FORMAT}: install the one that wrote it, or a later one"
        )
    try:
        for step in _STEPS[written:]:
            step(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not have the layout of format {written} ({type(error).__name__}: {error!s:.300}); use an older one"
        ) from error
    state["format"] = FORMAT
    return state


def _name_fields(state: StateDict) -> None:
    """Converts format 0: step statuses and descriptions of logged values were lists, in its first files without the last item."""
    scaler = state.get("amp", {}).get("scaler")
    if scaler is not None:
        scaler["known"] = _named(_VERDICT, scaler["known"], False)
    for rank in state.get("loops", {}).get("fit", {}).get("metrics", ()):
        for cell in rank["table"]["cells"]:
            cell["published"] = _named(_PUBLISHED, cell["published"], -1)
        for flush in rank["pending"]:
            flush["rows"] = [_named(_ROW, row) for row in flush["rows"]]
            for row in flush["rows"]:
                row["published"] = [_named(_PUBLISHED, values, -1) for values in row["published"]]


def _count_epochs(state: StateDict) -> None:
    """Converts format 1: its key "epoch" was the number of finished epochs; Lightning's is the index of the current epoch."""
    state.setdefault("loops", {}).setdefault("fit", {})["epoch"] = state.get("epoch", 0)


def _rename_keys(state: StateDict) -> None:
    """Converts format 2: the same values under other keys.

    A value that has another layout stays as it is: it is a plug-in's own, or the section that restores it raises.
    On disk a folder's tensors keep the names under which they were written; ``renamed`` beside their files has these.
    """
    for path, names in _RENAMED:
        for values in _dicts_at(state, path.split(".")):
            renamed = {names.get(key, key): value for key, value in values.items()}
            values.clear()
            values.update(renamed)
    for shards in _dicts_at(state, ["shards"]):
        shards["renamed"] = {"loops/fit/accumulation/": "loops/fit/window/"}
    for amp in _dicts_at(state, ["amp"]):
        if "scaler" in amp:
            from fabricamp.precision.loss_scaler import with_current_keys

            amp["scaler"] = with_current_keys(amp["scaler"])


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


def _named(names: tuple[str, ...], values: list[Any], last: object = None) -> dict[str, Any]:
    """Returns ``values`` by name; ``last`` fills in the last value if it is missing."""
    if len(values) < len(names):
        values = [*values, last]
    return dict(zip(names, values, strict=True))


_STEPS: Final = (_name_fields, _count_epochs, _rename_keys)
