"""The saves of a ModelCheckpoint: what happens to its files each time one is due.

Rank 0 plans a save, every rank carries the plan out.  What is known of the files is the callback's, and is saved with it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Protocol

from fabricamp.callbacks._checkpoint_files import SavePlan, planner_of
from fabricamp.callbacks._monitoring import missing_monitor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")


class Rotation(Protocol):
    """Writes a new file and removes those that it replaces, at the four occasions of a save; every rank calls it."""

    def at_step(self, trainer: Trainer) -> None:
        """Saves because steps or minutes have passed, or because such a save has waited for its validation."""

    def at_epoch_end(self, trainer: Trainer) -> None:
        """Saves if the epoch is due."""

    def at_end(self, trainer: Trainer) -> None:
        """Saves at the end of a training without a ``save_last`` file, so that it has one; called with ``save_last`` alone."""

    def at_exception(self, trainer: Trainer) -> None:
        """Saves the step at which an exception has ended training, whatever its score."""


class PlannedRotation:
    """Makes the saves of ``callback`` by a :class:`~fabricamp.callbacks._checkpoint_files.SavePlan` each."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        self._callback = callback

    def at_step(self, trainer: Trainer) -> None:
        """Saves a file if its score is among the top k, or without a monitor the newest, and the ``save_last`` file.

        If the monitor was not logged yet, only the ``save_last`` file.
        """
        self._save(trainer)

    def at_epoch_end(self, trainer: Trainer) -> None:
        """Saves as :meth:`at_step`, if the epoch is due."""
        if self._callback._is_due_epoch(trainer):
            self._save(trainer)

    def at_end(self, trainer: Trainer) -> None:
        """Saves whatever the score: a file of the usual name, unless ``save_top_k=0``, and the ``save_last`` file.

        Nothing if this step has a file already.
        """
        self._save(trainer, ranked=False)

    def at_exception(self, trainer: Trainer) -> None:
        """Saves whatever the score, the same files; without ``save_last``, ``last_model_path`` names the file.

        Nothing with ``save_top_k=0`` and without ``save_last``.
        """
        self._save(trainer, ranked=False)

    def _save(self, trainer: Trainer, *, ranked: bool = True) -> None:
        """Writes the file that rank 0 plans, then removes surplus files, then publishes the new paths.

        ``ranked`` False saves whatever the value of ``monitor``, and does not compare the file with the others.
        """
        callback = self._callback
        step = trainer.global_step
        already_done = step == (callback._judged_step if ranked else callback._saved_step)
        saves_nothing = trainer.fast_dev_run or not (callback.save_top_k or callback.save_last)
        if already_done or saves_nothing:
            return
        callback._check_monitor(trainer, ranked=ranked)
        plan = trainer.strategy.on_rank_zero(lambda: self._plan(trainer, ranked=ranked))
        if not plan.target:
            return
        if ranked:
            callback._judged_step = step
        self._execute(trainer, plan)
        callback._saved_step = step
        if callback.verbose and trainer.is_global_zero:
            _LOG.info("%s: step %d is saved in %s", type(callback).__name__, step, plan.target)

    def _plan(self, trainer: Trainer, *, ranked: bool) -> SavePlan:
        """Decides on rank 0: returns the file, its name and the files it replaces, and renames files that have a needed name.

        Files are renamed here, not in :meth:`_execute`: in the one exchange of a save, so that an error of a rename is raised on
        every rank, before the step counts as ranked.
        """
        callback = self._callback
        metrics = callback._metrics(trainer)
        score: float | None = None
        if ranked and callback.monitor is not None and callback.monitor in metrics:
            score = float(metrics[callback.monitor])
        waits_for_monitor = ranked and callback.monitor is not None and score is None  # it was not logged yet
        path = ""
        if callback.save_top_k and not waits_for_monitor:
            path = callback.format_checkpoint_name(metrics)
            self._warn_of_zeros(trainer, metrics)
        last = callback.format_checkpoint_name(metrics, callback.CHECKPOINT_NAME_LAST) if callback.save_last else ""
        plan = planner_of(trainer, callback, callback._foreign).plan(callback._adopted(), path, last, score)
        if not ranked and not last:
            # ``last_model_path`` also names a file that was written at Ctrl-C or an exception.
            plan = dataclasses.replace(plan, after=dataclasses.replace(plan.after, last=plan.target))
        plan.make_room()
        return plan

    def _warn_of_zeros(self, trainer: Trainer, metrics: Mapping[str, Tensor | float]) -> None:
        """Warns once about metrics in the file name that were not logged."""
        callback = self._callback
        if callback._told_of_zeros:
            return
        missing = [name for name in callback._template(callback.filename).fields if name not in metrics]
        if missing:
            callback._told_of_zeros = True
            _LOG.warning(
                "%s; file names have 0 for %s, and 'epoch' and 'step' always exist",
                missing_monitor(trainer, f"ModelCheckpoint(filename={callback.filename!r})", missing[0]),
                ", ".join(map(repr, missing)),
            )

    def _execute(self, trainer: Trainer, plan: SavePlan) -> None:
        """Carries out the plan."""
        self._callback._write(trainer, plan)
        trainer.strategy.on_rank_zero(plan.rotate)
        self._callback._publish(trainer, plan)
