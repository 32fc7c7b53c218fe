"""Which of several checkpoints to go on from: the furthest one that is whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fabricamp.checkpoint import places
from fabricamp.checkpoint.file import read_checkpoint, verify_checkpoint
from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["choose_checkpoint", "read_header"]

logger = logging.getLogger("fabricamp")


def choose_checkpoint(groups: Iterable[Iterable[str]], *, training: bool) -> str:
    """Returns the furthest whole checkpoint of the first group that has one; nothing where there are no files at all.

    How far a checkpoint is, it says itself: clocks jump.  With ``training`` those that hold weights only come last.  Each
    damaged one that is passed over is logged as a warning; where nothing else is left, that is a :class:`CheckpointError`.
    """
    problems: list[str] = []
    for files in groups:
        for place in _furthest_first(files, problems, training=training):
            try:
                verify_checkpoint(place)
            except CheckpointError as error:
                _tell(problems, error)
            else:
                return place
    if problems:
        raise CheckpointError(
            f"none of {len(problems)} checkpoints can be read: {'; '.join(problems):.2000}. Give the path of one that can, or move "
            "them away to start anew"
        )
    return ""


def read_header(place: str) -> dict[str, Any]:
    """Returns what a checkpoint holds, its tensors without their values: they are not read."""
    return read_checkpoint(place, map_location="meta", verify=False)


def _furthest_first(files: Iterable[str], problems: list[str], *, training: bool) -> list[str]:
    found: list[tuple[tuple[bool, int, int, int], str]] = []
    for place in dict.fromkeys(map(places.normal, files)):
        try:
            header = read_header(place)
            found.append((_how_far(header, training=training), place))
        except CheckpointError as error:
            _tell(problems, error)
    return [place for _, place in sorted(found, reverse=True)]


def _how_far(header: dict[str, Any], *, training: bool) -> tuple[bool, int, int, int]:
    position = header.get("loops", {})
    position = position.get("fit", {}) if isinstance(position, dict) else {}
    done = position.get("batches_done") if isinstance(position, dict) else 0
    counters = (header.get("global_step"), done, header.get("epoch"))
    step, batches, epoch = (value if isinstance(value, int) else 0 for value in counters)
    return (not training or "optimizer_states" in header), step, batches, epoch


def _tell(problems: list[str], error: CheckpointError) -> None:
    problems.append(str(error))
    logger.warning("fabricamp: passed over, the one before it is taken: %s", error)
