"""Ends a trial of Optuna early if its pruner decides so."""

from __future__ import annotations

import importlib
import os
import pickle
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fabricamp.callbacks._monitoring import checks_at_train_epoch_end, missing_monitor, monitored_value
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class _Trial(Protocol):
    """What is asked of Optuna's trial."""

    def report(self, value: float, step: int) -> object: ...

    def should_prune(self) -> bool: ...


class OptunaPruning(Callback):
    """Reports a metric to an Optuna trial after each validation, and ends training if the trial's pruner says so.

    Rank 0 reports and asks the pruner, and every rank ends after the same step.  The run ends normally; then ``fit`` raises
    ``optuna.TrialPruned`` in the calling process.  Values are reported by epoch, or by step if validation runs at other times.
    Reports from processes that the Trainer starts are repeated in the caller, so any storage works.

    Args:
        trial: the argument of Optuna's objective; may be None on ranks other than 0.
        monitor: the metric, logged over an epoch.

    Raises:
        ConfigError: for anything but a trial, a study with several objectives, or a ``monitor`` that is not logged.

    Example:
        >>> pruning = OptunaPruning(trial, monitor="val_loss")  # doctest: +SKIP
    """

    monitors: ClassVar[bool] = True

    def __init__(self, trial: Any, monitor: str) -> None:
        super().__init__()
        if trial is not None and not all(callable(getattr(trial, name, None)) for name in ("report", "should_prune")):
            raise ConfigError(f"OptunaPruning(trial={trial!r}): give the trial that Optuna calls the objective with")
        directions = getattr(getattr(trial, "study", None), "directions", ())
        if len(directions) > 1:
            raise ConfigError("OptunaPruning: Optuna prunes no trials of a study with several directions; leave it out")
        self.monitor = monitor
        self._trial: _Trial | None = trial
        self._process = os.getpid()
        self._reported: dict[int, float] = {}

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Opens a new connection to the storage in a forked process."""
        super().setup(trainer, pl_module, stage)
        if self._process != os.getpid():
            self._trial = pickle.loads(pickle.dumps(self._trial))  # noqa: S301 - made here
            self._process = os.getpid()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Reports and asks the pruner, if each epoch ends with its validation or there is no validation."""
        if checks_at_train_epoch_end(trainer):
            self._check(trainer, trainer.current_epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Reports and asks the pruner, if validation runs at other times."""
        if trainer.state.fitting and not checks_at_train_epoch_end(trainer):
            self._check(trainer, trainer.global_step)

    def _check(self, trainer: Trainer, step: int) -> None:
        if trainer.fast_dev_run:
            return
        value = trainer.strategy.broadcast(monitored_value(trainer, self.monitor))
        if value is None:
            raise ConfigError(missing_monitor(trainer, f"OptunaPruning(monitor={self.monitor!r})", self.monitor))
        pruned = False
        if trainer.is_global_zero and self._trial is not None:
            self._report({step: value})
            pruned = self._trial.should_prune()
        if trainer.strategy.broadcast(pruned):
            words = f"Optuna's pruner ended the trial: {self.monitor}={value:.6g} at {step}"
            trainer.stop(words, importlib.import_module("optuna").TrialPruned(words))

    def _report(self, values: dict[int, float]) -> None:
        """Reports the values that were not reported to the trial yet."""
        if self._trial is not None:
            for step, value in values.items():
                if step not in self._reported:
                    self._trial.report(value, step)
        self._reported |= values

    def state_dict(self) -> StateDict:
        """Returns the reported values."""
        return {"reported": dict(self._reported)} if self._reported else {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Reports the saved values to the trial of the resumed run."""
        self._report(state_dict["reported"])
