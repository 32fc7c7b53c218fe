"""The layout of fabricamp's own checkpoints has a number; files of earlier layouts are brought to today's when they are read."""

from __future__ import annotations

from typing import Any, Final

from fabricamp.errors import CheckpointError

FORMAT: Final = 2
"""The layout that is written today.  What changes it raises it, and adds a step to :data:`_STEPS`."""

_VERDICT = ("applied", "scale", "loss", "applied_steps", "skipped_steps", "ends_run")
_PUBLISHED = ("key", "plain_key", "per_step", "mode", "prog_bar", "logger", "sync_dist", "loader")
_ROW = ("published", "numbers", "weights", "device")


def upgraded(state: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns ``state``, as read from ``place``, in today's layout; files of other libraries stay what they are.

    Raises :class:`CheckpointError` where a later version wrote it, or where it is not laid out as its number says.
    """
    if "fabricamp_version" not in state:
        return state
    written = state.get("format", 0)
    if type(written) is not int or not 0 <= written <= FORMAT:
        raise CheckpointError(
            f"{place} has format {written!r:.100} and was written by fabricamp {state['fabricamp_version']!s:.100}; this version "
            f"reads formats up to {FORMAT}: install the one that wrote it, or a later one"
        )
    try:
        for step in _STEPS[written:]:
            step(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{place} is not laid out as format {written} is ({type(error).__name__}: {error!s:.300}); use an older one"
        ) from error
    state["format"] = FORMAT
    return state


def _name_fields(state: dict[str, Any]) -> None:
    """Format 0 had verdicts and the descriptions of logged values as lists; those of its first files were shorter."""
    scaler = state.get("amp", {}).get("scaler")
    if scaler is not None:
        scaler["known"] = _named(_VERDICT, scaler["known"], False)
    for rank in state.get("loops", {}).get("fit", {}).get("metrics", ()):
        for cell in rank["table"]["cells"]:
            cell["published"] = _named(_PUBLISHED, cell["published"], -1)
        for flush in rank["pending"]:
            flush["rows"] = [_named(_ROW, row) for row in flush["rows"]]
            for row in flush["rows"]:
                row["published"] = [_named(_PUBLISHED, one, -1) for one in row["published"]]


def _count_epochs(state: dict[str, Any]) -> None:
    """Format 1 had the number of epochs that are done as "epoch", where Lightning has the one that runs."""
    state.setdefault("loops", {}).setdefault("fit", {})["epoch"] = state.get("epoch", 0)


def _named(names: tuple[str, ...], values: list[Any], last: Any = None) -> dict[str, Any]:
    """``values`` by name; ``last`` is what the last one is where there is one too few."""
    return dict(zip(names, values if len(values) == len(names) else [*values, last], strict=True))


_STEPS: Final = (_name_fields, _count_epochs)
