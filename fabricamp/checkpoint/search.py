"""Finds the checkpoint to resume from among several: the furthest one that can be read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from fabricamp.checkpoint import storage
from fabricamp.checkpoint.file import read_checkpoint
from fabricamp.errors import CheckpointError

logger = logging.getLogger("fabricamp")


class Candidates:
    """Iterates over checkpoints, the furthest of each group first; skips damaged ones with a warning.

    A checkpoint's own counters decide how far it is, because clocks jump.  If several are equally far (such as the last checkpoints
    of two runs in one folder), the one written last comes first.  With ``training``, checkpoints with only weights come last.
    """

    def __init__(self, groups: Iterable[Iterable[str]], *, training: bool) -> None:
        self._problems: list[str] = []
        self._places = self._walk(groups, training=training)

    def next_place(self) -> str:
        """Returns the next checkpoint, or an empty string if there are no files.

        Raises a :class:`CheckpointError` that names all files if every file was skipped.
        """
        place = next(self._places, "")
        if self._problems and not place:
            raise CheckpointError(
                f"none of {len(self._problems)} checkpoints can be read: {'; '.join(self._problems):.2000}. Give the path of one "
                "that can, or move them away to start anew"
            )
        return place

    def pass_over(self, problem: str) -> None:
        """Records and logs why the last checkpoint is skipped."""
        self._problems.append(problem)
        logger.warning("passed over, an older one is tried: %s", problem)

    def _walk(self, groups: Iterable[Iterable[str]], *, training: bool) -> Iterator[str]:
        for files in groups:
            found: list[tuple[tuple[int, ...], str]] = []
            for place in dict.fromkeys(map(storage.normal, files)):
                try:
                    header = read_header(place)
                except CheckpointError as error:
                    self.pass_over(str(error))
                else:
                    trains = not training or "optimizer_states" in header
                    found.append(((trains, *how_far(header), storage.written_at(place)), place))
            yield from (place for _, place in sorted(found, reverse=True))


def read_header(place: str) -> dict[str, Any]:
    """Returns the content of a checkpoint with tensors on the meta device: their values are not read."""
    return read_checkpoint(place, map_location="meta", verify=False)


def how_far(header: dict[str, Any]) -> tuple[int, int, int]:
    """Returns a checkpoint's counters of finished steps, batches and epochs."""
    position = header.get("loops", {})
    position = position.get("fit", {}) if isinstance(position, dict) else {}
    done, epochs = (position.get("batches_done"), position.get("epoch")) if isinstance(position, dict) else (0, 0)
    step, batches, epoch = (
        value if isinstance(value, int) else 0 for value in (header.get("global_step"), done, epochs)
    )
    return step, batches, epoch
