"""The state of a run as ordered sections, saved as one dict whose tensors may be sharded.

Without sharded tensors, the state is gathered from all ranks and rank 0 writes a file; otherwise all ranks write a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fabricamp.checkpoint.checkpoint_io import load_by, reads_own_files, save_by, wait_for, writes_own_files
from fabricamp.checkpoint.form import form_of
from fabricamp.checkpoint.formats import FORMAT
from fabricamp.errors import CheckpointError, FabricampError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp._utils.types import StateDict, Stateful
    from fabricamp.strategies.base import Strategy


class WholeKey(str):
    """A key of a checkpoint that is not split at its dots: the name of a class within a function has some."""

    __slots__ = ()


class Section:
    """One part of a run's state, saved and restored as a unit."""

    name: str
    """Selects the section in ``Record.save`` and ``Record.restore``, and names it in error messages."""
    per_rank: ClassVar[bool] = False
    """Whether each rank has its own values, saved as a list over ranks; otherwise only rank 0's values are saved."""

    def save(self) -> StateDict:
        """Returns values by dotted keys, as in ``{"loops.fit.metrics": ...}``; every rank calls it, and it may use collectives.

        With several ranks, values saved per rank are in host memory.
        """
        raise NotImplementedError

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores its values from the complete ``checkpoint`` read from ``path``; keys may be missing in other trainers' files.

        :meth:`Record.restore` turns any error into a :class:`CheckpointError` that names ``path`` and the section.
        """
        raise NotImplementedError


@dataclass
class Part(Section):
    """A section for any object with ``state_dict`` and ``load_state_dict``; for None it saves an empty dict."""

    name: str
    place: str
    """The object's key in the checkpoint, dotted where it is in an inner dict."""
    part: Stateful | None

    def save(self) -> StateDict:
        """Returns the object's ``state_dict()`` under its key."""
        return {self.place: {} if self.part is None else self.part.state_dict()}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Passes the saved state to ``load_state_dict`` unless that state is missing or empty."""
        state = checkpoint
        for key in self.place.split("."):
            state = state.get(key, {})
        if state and self.part is not None:
            self.part.load_state_dict(state)


class Record:
    """The sections of a run, in the order in which they are saved and restored."""

    def __init__(self, strategy: Strategy, sections: Sequence[Section]) -> None:
        self._strategy = strategy
        self._sections = sections

    def save(self, *names: str) -> StateDict:
        """Returns a checkpoint of the named sections, or of all if none is named; every rank calls it."""
        from fabricamp import __version__

        checkpoint = {"format": FORMAT, "fabricamp_version": __version__, "torch_version": str(torch.__version__)}
        for section in self._selected(names):
            values = section.save()
            if section.per_rank:
                ranks = [values] if self._strategy.world_size == 1 else self._strategy.all_gather_object(values)
                values = {dotted_key: [rank[dotted_key] for rank in ranks] for dotted_key in values}
            for dotted_key, value in values.items():
                _put(checkpoint, dotted_key, value)
        return checkpoint

    def restore(self, checkpoint: StateDict, path: str, *names: str) -> None:
        """Restores the named sections, or all if none is named, from the ``checkpoint`` read from ``path``."""
        for section in self._selected(names):
            try:
                section.restore(checkpoint, path)
            except FabricampError:
                raise
            except Exception as error:  # the file may hold anything, and the loaders are torch's and the user's
                raise CheckpointError(
                    f"{path} does not fit: its {section.name} cannot be restored here ({type(error).__name__}: {error!s:.300}); "
                    "it is damaged, or belongs to another module, other optimizers or callbacks: give the checkpoint that this "
                    "script wrote"
                ) from error

    def _selected(self, names: Sequence[str]) -> list[Section]:
        return [section for section in self._sections if not names or section.name in names]


def _put(checkpoint: StateDict, dotted_key: str, value: object) -> None:
    *outer, last = [str(dotted_key)] if isinstance(dotted_key, WholeKey) else dotted_key.split(".")
    for key in outer:
        checkpoint = checkpoint.setdefault(key, {})
    checkpoint[last] = value


def write_together(path: str, checkpoint: StateDict, strategy: Strategy) -> None:
    """Writes ``checkpoint`` in the strategy's form, a file by rank 0 or a folder by all ranks; every rank calls it with its own."""
    io = strategy.checkpoint_io
    if io is not None and not writes_own_files(io):
        strategy.on_rank_zero(lambda: save_by(io, checkpoint, path))
    else:
        form_of(strategy).write(path, checkpoint, strategy)


def read_together(path: str, strategy: Strategy, *, weights_only: bool | None = None) -> StateDict:
    """Returns the checkpoint on every rank; if one rank cannot read it, all ranks raise that rank's :class:`CheckpointError`.

    ``weights_only`` False allows code to rebuild its objects.  If the strategy shards the module, its tensors are not read yet: a
    file is memory-mapped, a folder's are on the meta device.
    """
    checkpoint: StateDict = {}
    problem = None
    try:
        checkpoint = _read_for(path, strategy, weights_only=weights_only)
    except CheckpointError as error:
        problem = error
    strategy.agree(problem)
    return checkpoint


def _read_for(path: str, strategy: Strategy, *, weights_only: bool | None) -> StateDict:
    """Returns the checkpoint as this rank reads it: by the plug-in, or in the strategy's form."""
    io = strategy.checkpoint_io
    if io is not None and not reads_own_files(io):
        wait_for(io)
        return load_by(io, path, weights_only=weights_only)
    return form_of(strategy).read(path, strategy, weights_only=weights_only)
