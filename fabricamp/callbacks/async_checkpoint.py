"""Writes checkpoints in the background, while training continues."""

from __future__ import annotations

import functools
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fabricamp.callbacks._rotation import PlannedRotation
from fabricamp.callbacks.base import ends_everywhere
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.checkpoint import BackgroundWriter, StagedFolder, write_checkpoint
from fabricamp.checkpoint.form import form_of
from fabricamp.errors import CheckpointError
from fabricamp.ops.shards import local
from fabricamp.strategies.process_group import SideProcessGroup
from fabricamp.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp._utils.types import AnyBatch, AnyOutput, OptimizerFace, StateDict
    from fabricamp.callbacks._checkpoint_files import SavePlan
    from fabricamp.callbacks.base import Callback
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

Value = TypeVar("Value")


class AsyncCheckpoint(ModelCheckpoint):
    """A :class:`ModelCheckpoint` that copies the state to host memory and writes it in a background thread.

    Arguments and files are the same.  The copy goes to reused memory, pinned if the tensors are on a GPU; training waits only for
    the copy, and the host does not wait.  At most one write is in flight: the next save and the end of training wait for it.  If
    a write fails, the next step raises, and the paths still name the previous file.

    If a strategy shards the module, each rank copies and writes its shards, and the ranks synchronise over a separate Gloo group
    during training.  If one of them fails, all raise, at the next save or at the end of training.

    Example:
        >>> checkpoint = AsyncCheckpoint(every="1000 steps, 30 min", save_last=True)
    """

    _writer: BackgroundWriter | None = None
    _in_flight: SavePlan | None = None
    _unsettled = False  # a write was started; equal on every rank, unlike the progress of rank 0's thread
    _beside: SideProcessGroup | None = None  # set if all ranks write
    _prepared = False  # host memory is being pinned

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Creates the background writer."""
        super().on_train_start(trainer, pl_module)
        self._writer = BackgroundWriter()
        self._prepared = False
        self._in_flight = None
        self._unsettled = False
        all_ranks_write = form_of(trainer.strategy).all_ranks_write
        self._beside = SideProcessGroup(trainer.strategy) if all_ranks_write else None

    def holds_at(self, global_step: int) -> float:
        """Returns the next step at which a save may be due."""
        return super().holds_at(global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Publishes a finished write, then saves if a save is due."""
        writer = self._writer
        if writer is not None and not self._prepared:
            self._prepared = True
            self._prepare(trainer, writer)
        # If all ranks write, a failure waits for the next save, where all of them raise it.
        if writer is not None and writer.finished and (self._beside is None or not writer.failed):
            self._finish_write(trainer, writer.wait)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Waits for the last write; later saves are synchronous."""
        # First: rank 0 may know of a file already that the other ranks wait for, and the last save depends on it.
        self._settle(trainer)
        super().on_train_end(trainer, pl_module)
        self._settle(trainer)
        side_group = self._beside
        if self._writer is not None:
            self._writer.release()
        self._writer = None
        self._beside = None
        if side_group is not None:
            side_group.leave()

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Lets the write in flight finish, whatever ended training; a second Ctrl-C does not wait for it."""
        writer = self._writer
        try:
            if ends_everywhere(trainer, exception):
                self._settle(trainer)  # else a rank whose write failed would save alone
            elif writer is not None and trainer.state.fitting:
                self._finish_write(trainer, writer.wait)
        except CheckpointError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)  # the exception itself is raised anyway
        finally:
            self._writer = None
            self._beside = None
            if writer is not None:
                writer.release()
        super().on_exception(trainer, pl_module, exception)

    @property
    def _planned_rotation(self) -> PlannedRotation:
        return _BackgroundRotation(self)

    def _prepare(self, trainer: Trainer, writer: BackgroundWriter) -> None:
        """Lets host memory be pinned on the ranks that write a state of GPUs; called after a step, when optimizers have states."""
        all_write = self._beside is not None
        if trainer.strategy.device.type == "cuda" and (all_write or trainer.is_global_zero):
            writer.prepare(size_on_gpu(trainer))

    def _settle(self, trainer: Trainer) -> None:
        """Waits on every rank for the write in flight; every rank raises its error."""
        writer = self._writer
        if writer is None or not self._unsettled:
            return
        self._unsettled = False
        if self._beside is None:
            self._finish_write(trainer, lambda: trainer.strategy.on_rank_zero(writer.wait))
        else:
            self._finish_write(trainer, lambda: _together(trainer, writer.wait))

    def _finish_write(self, trainer: Trainer, wait: Callable[[], None]) -> None:
        """Publishes the file in flight if ``wait`` does not raise; ranks that do not write have no file in flight."""
        plan = self._in_flight
        self._in_flight = None
        try:
            wait()
        except CheckpointError:
            self._saved_step = -1  # this step has no file yet
            self._judged_step = -1
            raise
        if plan is not None:
            self._publish(trainer, plan)


class _BackgroundRotation(PlannedRotation):
    """Carries out plans in the background, while training lasts."""

    _callback: AsyncCheckpoint

    def _save(self, trainer: Trainer, *, ranked: bool = True) -> None:
        self._callback._settle(trainer)
        super()._save(trainer, ranked=ranked)

    def _execute(self, trainer: Trainer, plan: SavePlan) -> None:
        callback = self._callback
        writer = callback._writer
        side_group = callback._beside
        if writer is None:  # training has ended
            super()._execute(trainer, plan)
            return

        def start_file(path: str, state: StateDict) -> None:
            def write(copied: StateDict) -> None:
                trainer.delivery.barrier(copied.get("global_step", 0))
                write_checkpoint(path, copied)
                plan.rotate()

            writer.start(state, write)

        def start_folder(path: str, state: StateDict) -> None:
            assert side_group is not None
            folder = StagedFolder(path, state, side_group)

            def write(copied: StateDict) -> None:
                side_group.on_rank_zero(lambda: trainer.delivery.barrier(folder.step))
                folder.write(copied)
                side_group.on_rank_zero(plan.rotate)

            writer.write_copy(_together(trainer, lambda: writer.take(folder.own)), write)

        callback._write(trainer, plan, start_file if side_group is None else start_folder)
        callback._in_flight = plan
        callback._unsettled = True


def size_on_gpu(trainer: Trainer) -> int:
    """Returns about how many bytes a checkpoint has on the GPU: of the module, and of the optimizers' tensors."""
    session = trainer._runner.session
    assert session is not None
    tensors = [*session.module.parameters(), *session.module.buffers(), *_of_optimizers(session.optimizers)]
    storages = {
        own.untyped_storage().data_ptr(): -(-own.untyped_storage().nbytes() // 64) * 64
        for own in chain.from_iterable(map(_parts_of, tensors))
        if own.is_cuda and own.layout is torch.strided
    }
    return sum(storages.values())


def _of_optimizers(optimizers: Sequence[OptimizerFace]) -> list[Tensor]:
    """Returns the optimizers' parameters, and the tensors of their states."""
    found: list[Any] = []
    for optimizer in optimizers:
        found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for state in getattr(optimizer, "state", {}).values():
            found += state.values() if isinstance(state, dict) else ()
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _parts_of(tensor: Any) -> list[Tensor]:
    """Returns the tensors with memory that ``tensor`` consists of: of one of 8 bits, its codes and scales."""
    own = local(tensor)
    if not is_traceable_wrapper_subclass(own):
        return [own]
    wrapper: Any = own
    names, _ = wrapper.__tensor_flatten__()
    return [part for name in names for part in _parts_of(getattr(wrapper, name))]


def _together(trainer: Trainer, action: Callable[[], Value]) -> Value:
    """Runs ``action`` on every rank; if one rank raises a :class:`CheckpointError`, all raise it."""
    problem: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as error:
        problem = error
    trainer.strategy.agree(problem)
    return result


def write_in_background(callback: Callback) -> None:
    """Makes a ModelCheckpoint write as an :class:`AsyncCheckpoint` does; it keeps its class's name, and so the key of its state."""
    if isinstance(callback, ModelCheckpoint) and not isinstance(callback, AsyncCheckpoint):
        kind: Any = type(callback)
        callback.__class__ = _background_kind(kind)


@functools.cache
def _background_kind(kind: Any) -> Any:
    """Returns a subclass of ``kind`` that writes in the background."""
    bases = (AsyncCheckpoint,) if kind is ModelCheckpoint else (kind, AsyncCheckpoint)
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
    return type(kind.__name__, bases, {**names, "__reduce__": _reduced, "_written_as": kind})


def _reduced(callback: Any) -> tuple[Any, ...]:
    return _blank, (type(callback)._written_as,), callback.__getstate__()


def _blank(kind: object) -> Any:
    return object.__new__(_background_kind(kind))
