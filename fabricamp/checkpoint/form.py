"""The form of a run's checkpoints: one file, or a folder of all ranks' shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from fabricamp.checkpoint import storage
from fabricamp.checkpoint.file import write_checkpoint
from fabricamp.checkpoint.reading import map_once, read_once
from fabricamp.checkpoint.shard_loading import sharded_weights
from fabricamp.strategies.host_ranks import host_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.base import Strategy


class CheckpointForm(ABC):
    """Writes and reads a run's checkpoints; every rank calls each method."""

    all_ranks_write: ClassVar[bool]
    """Whether every rank writes its part of a checkpoint; else rank 0 writes it alone."""

    @abstractmethod
    def on_writers(self, strategy: Strategy, write: Callable[[], None]) -> None:
        """Calls ``write`` on the ranks that write."""

    @abstractmethod
    def write(self, path: str, checkpoint: StateDict, strategy: Strategy) -> None:
        """Writes ``checkpoint``, this rank's own, to ``path``."""

    @abstractmethod
    def read(self, path: str, strategy: Strategy, *, weights_only: bool | None) -> StateDict:
        """Returns the checkpoint at ``path`` as this rank needs it; code rebuilds its objects only with ``weights_only`` False.

        Raises :class:`CheckpointError` on the ranks that cannot read it.
        """

    @abstractmethod
    def place_weights(self, checkpoint: StateDict, path: str, module: nn.Module) -> StateDict:
        """Returns ``checkpoint``, a result of :meth:`read`, with its weights laid out as those of ``module``."""


class OneFile(CheckpointForm):
    """A file that rank 0 writes: the ranks have equal weights."""

    all_ranks_write: ClassVar[bool] = False

    def on_writers(self, strategy: Strategy, write: Callable[[], None]) -> None:
        """Calls ``write`` on rank 0; an error there is raised on every rank."""
        strategy.on_rank_zero(write)

    def write(self, path: str, checkpoint: StateDict, strategy: Strategy) -> None:
        """Writes the file on rank 0."""
        strategy.on_rank_zero(lambda: write_checkpoint(path, checkpoint))

    def read(self, path: str, strategy: Strategy, *, weights_only: bool | None) -> StateDict:
        """Returns the content of the file, or of a folder with full tensors; one rank of a host reads it."""
        path = storage.normalized(path)
        with host_ranks(strategy, _told(path)) as host:
            if not storage.is_folder(path):
                return read_once(path, host, weights_only=weights_only)
            from fabricamp.checkpoint.folder import read_folder_once

            return read_folder_once(path, host, weights_only=weights_only)

    def place_weights(self, checkpoint: StateDict, path: str, module: nn.Module) -> StateDict:
        """Returns ``checkpoint`` itself."""
        return checkpoint


class ShardFolder(CheckpointForm):
    """A folder to which every rank writes its shards of the module and of the optimizers' states."""

    all_ranks_write: ClassVar[bool] = True

    # Only runs that shard import the modules of folders: torch's distributed checkpoint takes a second to import.

    def on_writers(self, strategy: Strategy, write: Callable[[], None]) -> None:
        """Calls ``write`` on every rank."""
        write()

    def write(self, path: str, checkpoint: StateDict, strategy: Strategy) -> None:
        """Writes the folder, together with the other ranks."""
        from fabricamp.checkpoint.folder import write_folder

        write_folder(path, checkpoint, strategy)

    def read(self, path: str, strategy: Strategy, *, weights_only: bool | None) -> StateDict:
        """Returns a folder's content with sharded tensors on the meta device, or a file's, memory-mapped."""
        path = storage.normalized(path)
        with host_ranks(strategy, _told(path)) as host:
            if storage.is_remote(path):
                return read_once(path, host, weights_only=weights_only)
            if not storage.is_folder(path):
                return map_once(path, host, weights_only=weights_only)
            from fabricamp.checkpoint.folder import check_together, read_without_shards

            checkpoint = read_without_shards(path, host, weights_only=weights_only)
        check_together(path, checkpoint, strategy)
        return checkpoint

    def place_weights(self, checkpoint: StateDict, path: str, module: nn.Module) -> StateDict:
        """Returns ``checkpoint`` with this rank's shards of the weights."""
        return sharded_weights(checkpoint, path, module.state_dict())


_ONE_FILE: Final = OneFile()
_SHARD_FOLDER: Final = ShardFolder()


def _told(path: str) -> tuple[object, ...]:
    """Returns what a rank knows of a checkpoint before it reads it: ranks that know the same may share what one of them reads."""
    return path, storage.is_folder(path), storage.identity(path)


def form_of(strategy: Strategy) -> CheckpointForm:
    """Returns the form of the checkpoints of a run with ``strategy``."""
    return _SHARD_FOLDER if strategy.sharding.shards else _ONE_FILE
