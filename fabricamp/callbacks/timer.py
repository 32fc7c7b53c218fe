"""How long a run takes, and when it is to end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from fabricamp.arguments.checks import check_choice
from fabricamp.arguments.durations import as_seconds
from fabricamp.callbacks.base import Callback
from fabricamp.state import RunningStage

if TYPE_CHECKING:
    from datetime import timedelta

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class Timer(Callback):
    """Notes how long training, validation and tests take, and ends the training after ``duration``.

    Time of the runs that a resumed one goes on from counts; ``Trainer(max_time=...)`` is about one run alone.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a dict such as ``{"hours": 2}``; None only notes the time.
        interval: "step" ends after the step, "epoch" after the epoch.
        verbose: changes nothing: the line at the end of the fit says why it ended.

    Raises:
        ConfigError: for a duration or an interval that is none.

    Example:
        >>> timer = Timer(duration="00:12:00:00", interval="epoch")
        >>> timer.time_remaining()
        43200.0
    """

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        self._duration = as_seconds("duration", duration)
        self._interval = str(check_choice("interval", interval, ("step", "epoch")))
        self._start: dict[RunningStage, float] = {}
        self._end: dict[RunningStage, float] = {}
        self._before = 0.0

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """When "train", "validate" or "test" began last, by ``time.monotonic``; None where it has not."""
        return self._start.get(RunningStage(stage))

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """When it ended; None where it has not."""
        return self._end.get(RunningStage(stage))

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """How many seconds it took, or takes up to now; of training with those of the runs that it goes on from."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._before if RunningStage(stage) is RunningStage.TRAINING else 0.0
        return before if start is None else (time.monotonic() if end is None else end) - start + before

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """How many seconds are left; None without a duration."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A resumed run may have no time left."""
        self._look(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes the time, as the next ones do."""
        self._begin(RunningStage.TRAINING)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """The training is over."""
        self._end[RunningStage.TRAINING] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A validation begins."""
        self._begin(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """It is over."""
        self._end[RunningStage.VALIDATING] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A test begins."""
        self._begin(RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """It is over."""
        self._end[RunningStage.TESTING] = time.monotonic()

    def holds_at(self, global_step: int) -> float:
        """Never: a launch of several steps ends before it stops the training."""
        return math.inf

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the clock behind each micro-batch."""
        if self._interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Looks at the clock behind each epoch."""
        self._look(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns how long training took so far."""
        return {"time_elapsed": {"train": self.time_elapsed()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back, also of a file of Lightning's."""
        self._before = float(state_dict.get("time_elapsed", {}).get("train", 0.0))

    def _begin(self, stage: RunningStage) -> None:
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _look(self, trainer: Trainer) -> None:
        left = self.time_remaining()
        if left is not None and left <= 0:  # ranks may see it at different steps: they agree on one
            trainer.state.ask(f"Timer: {self._duration:g} s are over")
