"""When a validation within fit is due: after a number of micro-batches, or by steps, epochs or minutes.

The loop counts micro-batches itself (``TrainingLoop._due_by_batches``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.arguments.cadence import Cadence
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp.arguments.cadence import Every
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings


def batches_between_validations(settings: Settings, interval: float, length: float) -> float:
    """Returns the micro-batches from one validation to the next, for ``val_check_interval`` as a number or a share of an epoch.

    ``length``: the micro-batches of an epoch; inf if unknown.
    """
    if isinstance(interval, int):
        if settings.fast_dev_run:
            return min(interval, length)
        validates = settings.limit_val_batches > 0
        if validates and interval > length and settings.check_val_every_n_epoch is not None:
            raise ConfigError(
                f"val_check_interval={interval} is more than the {length} batches of an epoch, so validation would never run; "
                "give less, or check_val_every_n_epoch=None to count across epochs"
            )
        return interval
    if length == float("inf"):
        if interval != 1.0:
            raise ConfigError(
                f"val_check_interval={interval} is a share of a loader without a length; give a number of batches (int)"
            )
        return length
    return max(1, int(length * interval))


class ValidationCadence:
    """Decides after which micro-batch a validation is due; every rank gets the same answer, by rank 0's clock.

    Steps and epochs are counted from the beginning of the run, time from the beginning of each fit.  A validation that is due by
    time waits for an epoch with a number divisible by ``epochs``.
    """

    def __init__(self, every: Every, epochs: int, state: RunState, strategy: Strategy) -> None:
        self._every = every
        self._epochs = epochs
        self._state = state
        self._strategy = strategy
        self._clock = Cadence(0, every.interval)
        self._clock.start(state.global_step)
        self._last_step = 0

    def follows(self, last: bool) -> bool:
        """Whether a validation is due after this micro-batch by steps or epochs; reads no clock, and may be called at any time."""
        state = self._state
        return self._is_counted(last, ends_step=state.open_batches == 0 and state.global_step != self._last_step)

    def _is_counted(self, last: bool, *, ends_step: bool) -> bool:
        every = self._every
        state = self._state
        ends_epochs = last and every.epochs > 0 and (state.epoch + 1) % every.epochs == 0
        return ends_epochs or (ends_step and every.steps > 0 and state.global_step % every.steps == 0)

    def is_due(self, last: bool) -> bool:
        """Whether a validation is due after this micro-batch; ``last``: it is the last one of its epoch."""
        state = self._state
        step = state.global_step
        # Within an accumulation, and after a micro-batch without a loss, the last step has been checked already.
        ends_step = state.open_batches == 0 and step != self._last_step
        due = self._is_counted(last, ends_step=ends_step)
        if ends_step:
            self._last_step = step
            if step >= self._clock.next_look and (state.epoch + 1) % self._epochs == 0:
                # The clock is asked even if a validation is due already: an interval that is over has to begin again.
                due = self._clock.is_due(step, self._strategy) or due
        return due
