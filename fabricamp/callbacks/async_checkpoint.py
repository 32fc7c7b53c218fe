"""Checkpoints that training does not wait for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.checkpoint import BackgroundWriter, write_checkpoint
from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.callbacks._save_plan import Plan
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class AsyncCheckpoint(ModelCheckpoint):
    """A :class:`ModelCheckpoint` that copies the state to host memory and writes it beside training.

    Arguments and files are the same.  The copy is made in memory that is reused (pinned where the tensors are on a GPU,
    which then is all that training waits for, without the host).  One write is in flight at most: a save that comes earlier
    waits for it, and so does the end of training.  Where a write fails, the next step raises, and the paths still show the
    file before.

    Example:
        >>> checkpoint = AsyncCheckpoint(every="1000 steps, 30 min", save_last=True)
    """

    _writer: BackgroundWriter | None = None
    _in_flight: Plan | None = None
    _unsettled = False  # the same on every rank, unlike what rank 0's thread has come to

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Makes ready what writes."""
        super().on_train_start(trainer, pl_module)
        self._writer, self._in_flight, self._unsettled = BackgroundWriter(), None, False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes note of a write that has ended, then saves where it is time."""
        if self._writer is not None and self._writer.over:
            self._take_in(self._writer.wait)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Waits for the last write; what is saved from now on is waited for."""
        self._settle(trainer)
        self._writer = None

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Lets the write in flight come to its end, whatever happened to training; a second Ctrl-C does not wait for it."""
        writer, self._writer = self._writer, None
        if writer is not None and trainer.state.fitting:
            try:
                self._take_in(writer.wait)
            except CheckpointError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)  # the exception itself is on its way
        super().on_exception(trainer, pl_module, exception)

    def _save(self, trainer: Trainer, *, ranked: bool = True) -> None:
        self._settle(trainer)
        super()._save(trainer, ranked=ranked)

    def _write(self, trainer: Trainer, plan: Plan) -> None:
        writer = self._writer
        if writer is None:
            super()._write(trainer, plan)
            return

        def put_away(path: str, state: dict[str, Any]) -> None:
            trainer.delivery.barrier(state.get("global_step", 0))
            write_checkpoint(path, state)
            self._rotate(plan)

        self._hand_over(trainer, plan, lambda path, state: writer.start(state, lambda copied: put_away(path, copied)))
        self._in_flight, self._unsettled = plan, True

    def _settle(self, trainer: Trainer) -> None:
        """Waits, on every rank, for the write in flight; what went wrong with it is raised by all."""
        writer = self._writer
        if writer is None or not self._unsettled:
            return
        self._unsettled = False
        self._take_in(lambda: trainer.strategy.on_rank_zero(writer.wait))

    def _take_in(self, wait: Callable[[], None]) -> None:
        """Publishes the file in flight, once ``wait`` has not raised; on ranks that do not write there is nothing to wait for."""
        plan, self._in_flight = self._in_flight, None
        try:
            wait()
        except CheckpointError:
            self._saved_step = self._judged_step = -1  # this step has no file yet
            raise
        if plan is not None:
            self._publish(plan)
