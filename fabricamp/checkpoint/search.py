"""Which of several checkpoints to go on from: the furthest one that can be read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from fabricamp.checkpoint import places
from fabricamp.checkpoint.file import read_checkpoint
from fabricamp.errors import CheckpointError

logger = logging.getLogger("fabricamp")


class Candidates:
    """Checkpoints one after the other, each group's furthest first; damaged ones are passed over with a warning.

    How far a checkpoint is, it says itself: clocks jump.  Of those that are as far as each other, such as the last ones of two runs
    into one folder, the one written last comes first.  With ``training`` those that hold weights only come last.
    """

    def __init__(self, groups: Iterable[Iterable[str]], *, training: bool) -> None:
        self._problems: list[str] = []
        self._places = self._walk(groups, training=training)

    def next_place(self) -> str:
        """The next one; nothing where there are no files at all.

        Raises :class:`CheckpointError` that names them all where there are some, and every one was passed over.
        """
        place = next(self._places, "")
        if self._problems and not place:
            raise CheckpointError(
                f"none of {len(self._problems)} checkpoints can be read: {'; '.join(self._problems):.2000}. Give the path of one "
                "that can, or move them away to start anew"
            )
        return place

    def pass_over(self, problem: str) -> None:
        """Notes, and tells, why the last one is not the one."""
        self._problems.append(problem)
        logger.warning("passed over, an older one is tried: %s", problem)

    def _walk(self, groups: Iterable[Iterable[str]], *, training: bool) -> Iterator[str]:
        for files in groups:
            found: list[tuple[tuple[int, ...], str]] = []
            for place in dict.fromkeys(map(places.normal, files)):
                try:
                    header = read_header(place)
                except CheckpointError as error:
                    self.pass_over(str(error))
                else:
                    trains = not training or "optimizer_states" in header
                    found.append(((trains, *how_far(header), places.written_at(place)), place))
            yield from (place for _, place in sorted(found, reverse=True))


def read_header(place: str) -> dict[str, Any]:
    """Returns what a checkpoint holds, its tensors without their values: they are not read."""
    return read_checkpoint(place, map_location="meta", verify=False)


def how_far(header: dict[str, Any]) -> tuple[int, int, int]:
    """The steps, batches and epochs that a checkpoint says were done."""
    position = header.get("loops", {})
    position = position.get("fit", {}) if isinstance(position, dict) else {}
    done, epochs = (position.get("batches_done"), position.get("epoch")) if isinstance(position, dict) else (0, 0)
    step, batches, epoch = (
        value if isinstance(value, int) else 0 for value in (header.get("global_step"), done, epochs)
    )
    return step, batches, epoch
