"""Format numbers of fabricamp's own checkpoints; converts earlier formats to the current one on reading."""

from __future__ import annotations

from typing import Any, Final

from fabricamp.errors import CheckpointError

FORMAT: Final = 2
"""The current format.  A change of the layout raises this number and adds a step to :data:`_STEPS`."""

_VERDICT = ("applied", "scale", "loss", "applied_steps", "skipped_steps", "ends_run")
_PUBLISHED = ("key", "plain_key", "per_step", "mode", "prog_bar", "logger", "sync_dist", "loader")
_ROW = ("published", "numbers", "weights", "device")


def upgraded(state: dict[str, Any], path: str) -> dict[str, Any]:
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


def _name_fields(state: dict[str, Any]) -> None:
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


def _count_epochs(state: dict[str, Any]) -> None:
    """Converts format 1: its key "epoch" was the number of finished epochs; Lightning's is the index of the current epoch."""
    state.setdefault("loops", {}).setdefault("fit", {})["epoch"] = state.get("epoch", 0)


def _named(names: tuple[str, ...], values: list[Any], last: Any = None) -> dict[str, Any]:
    """Returns ``values`` by name; ``last`` fills in the last value if it is missing."""
    if len(values) < len(names):
        values = [*values, last]
    return dict(zip(names, values, strict=True))


_STEPS: Final = (_name_fields, _count_epochs)
