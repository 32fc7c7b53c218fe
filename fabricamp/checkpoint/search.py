"""Finds the checkpoint to resume from among several: the furthest one that can be read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from fabricamp._utils.types import CheckpointFiles, StateDict
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.checkpoint_io import load_by, reads_own_files
from fabricamp.checkpoint.reading import read_checkpoint
from fabricamp.errors import CheckpointError, CheckpointObjectsError

logger = logging.getLogger("fabricamp")


class Candidates:
    """Iterates over checkpoints, the furthest of each group first; skips damaged ones with a warning.

    A checkpoint's own counters decide how far it is, because clocks jump.  If several are equally far (such as the last checkpoints
    of two runs in one folder), the one written last comes first.  With ``training``, checkpoints with only weights come last.
    A file whose objects are not allowed to be rebuilt is not damaged: it raises :class:`CheckpointObjectsError`.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[str]],
        *,
        training: bool,
        io: CheckpointFiles | None = None,
        weights_only: bool | None = None,
    ) -> None:
        self._io = io
        self._problems: list[str] = []
        self._weights_only = weights_only
        self._paths = self._ordered(groups, training=training)

    def next_path(self) -> str:
        """Returns the next checkpoint, or an empty string if there are no files.

        Raises a :class:`CheckpointError` that names all files if every file was skipped.
        """
        path = next(self._paths, "")
        if self._problems and not path:
            raise CheckpointError(
                f"none of {len(self._problems)} checkpoints can be read: {'; '.join(self._problems):.2000}. Give the path of one "
                "that can, or move them away to start anew"
            )
        return path

    def skip(self, problem: str) -> None:
        """Records and logs why the last checkpoint is skipped."""
        self._problems.append(problem)
        logger.warning("skipped, trying an older checkpoint: %s", problem)

    def _ordered(self, groups: Iterable[Iterable[str]], *, training: bool) -> Iterator[str]:
        """Yields the readable checkpoints of each group, the furthest first; skips damaged ones."""
        for files in groups:
            readable: list[tuple[tuple[int, ...], str]] = []
            for path in dict.fromkeys(map(storage.normalized, files)):
                try:
                    header = read_header(path, self._io, weights_only=self._weights_only)
                except CheckpointObjectsError:
                    # The file is not damaged, so no other file is tried.
                    raise
                except CheckpointError as error:
                    self.skip(str(error))
                else:
                    can_train = not training or "optimizer_states" in header
                    readable.append(((can_train, *progress_in(header), storage.modified_at(path)), path))
            yield from (path for _, path in sorted(readable, reverse=True))


def read_header(path: str, io: CheckpointFiles | None = None, *, weights_only: bool | None = None) -> StateDict:
    """Returns the content of a checkpoint with tensors on the meta device: their values are not read, and objects stay closed.

    ``weights_only`` False is for files of other trainers, whose objects are among the plain values.  A plug-in (``io``) that loads
    by itself loads the complete file.
    """
    if io is not None and not reads_own_files(io):
        return load_by(io, path, weights_only=weights_only)
    return read_checkpoint(path, map_location="meta", verify=False, weights_only=weights_only)


def progress_in(header: StateDict) -> tuple[int, int, int]:
    """Returns a checkpoint's counters of finished steps, batches and epochs; 0 for a counter that is not in the file."""
    loops = header.get("loops", {})
    position = loops.get("fit", {}) if isinstance(loops, dict) else {}
    batches: object = 0
    epochs: object = 0
    if isinstance(position, dict):
        batches = position.get("batches_done")
        epochs = position.get("epoch")
    return _count(header.get("global_step")), _count(batches), _count(epochs)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
