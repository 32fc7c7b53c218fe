"""Measures how long a run takes, and ends it after a given time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from fabricamp.arguments.cadence import as_seconds
from fabricamp.arguments.checks import check_choice
from fabricamp.callbacks.base import Callback
from fabricamp.state import RunningStage

if TYPE_CHECKING:
    from datetime import timedelta

    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class Timer(Callback):
    """Measures the time of training, validation and tests, and ends training after ``duration``.

    In a resumed run the time of the earlier runs counts too; ``Trainer(max_time=...)`` limits each run separately.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a dict such as ``{"hours": 2}``; None only measures time.
        interval: "step" ends training after the current step, "epoch" after the current epoch.
        verbose: changes nothing: the line at the end of the fit says why it ended.

    Raises:
        ConfigError: for an invalid duration or interval.

    Example:
        >>> timer = Timer(duration="00:12:00:00", interval="epoch")
        >>> timer.time_remaining()
        43200.0
    """

    _ends_run = True

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        super().__init__()
        self._duration = as_seconds("duration", duration)
        self._interval = str(check_choice("interval", interval, ("step", "epoch")))
        self._start: dict[RunningStage, float] = {}
        self._end: dict[RunningStage, float] = {}
        self._before = 0.0

    @classmethod
    def of_max_time(cls, max_time: str | timedelta | dict[str, int]) -> Timer:
        """Returns the Timer of ``Trainer(max_time=...)`` in ``trainer.callbacks``: it measures, and the Trainer ends the run."""
        timer = cls(max_time)
        timer._ends_run = False
        return timer

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Returns when ``stage`` ("train", "validate" or "test") last began, by ``time.monotonic``; None if it has not."""
        return self._start.get(RunningStage(stage))

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Returns when ``stage`` ended, by ``time.monotonic``; None if it has not."""
        return self._end.get(RunningStage(stage))

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Returns the seconds that ``stage`` took, or has taken so far; training includes the runs it was resumed from."""
        start = self.start_time(stage)
        end = self.end_time(stage)
        before = self._before if RunningStage(stage) is RunningStage.TRAINING else 0.0
        if start is None:
            return before
        if end is None:
            end = time.monotonic()
        return end - start + before

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Returns the seconds that are left; None without a duration."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Ends a resumed run that has no time left."""
        self._check(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which training begins."""
        self._begin(RunningStage.TRAINING)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which training ends."""
        self._end[RunningStage.TRAINING] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which validation begins."""
        self._begin(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which validation ends."""
        self._end[RunningStage.VALIDATING] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which a test begins."""
        self._begin(RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time at which a test ends."""
        self._end[RunningStage.TESTING] = time.monotonic()

    def holds_at(self, global_step: int) -> float:
        """Returns inf: a launch of several steps completes before the Timer ends training."""
        return math.inf

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Checks the time after each micro-batch."""
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks the time after each epoch."""
        self._check(trainer)

    def state_dict(self) -> StateDict:
        """Returns the seconds that training took so far."""
        return {"time_elapsed": {"train": self.time_elapsed()}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the seconds that training took, also from Lightning's file."""
        self._before = float(state_dict.get("time_elapsed", {}).get("train", 0.0))

    def _begin(self, stage: RunningStage) -> None:
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _check(self, trainer: Trainer) -> None:
        left = self.time_remaining() if self._ends_run else None
        if left is not None and left <= 0:  # ranks may see it at different steps: they agree on one
            trainer.state.ask(f"Timer: {self._duration:g} s are over")
