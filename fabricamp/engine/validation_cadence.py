"""Decides when a validation within fit is due, if it was asked for in steps, epochs or minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.arguments.cadence import Cadence

if TYPE_CHECKING:
    from fabricamp.arguments.cadence import Every
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy


class ValidationCadence:
    """Says after which micro-batch a validation is due; every rank gets the same answer, by rank 0's clock.

    Steps and epochs are counted from the beginning of the run, time from the beginning of each fit.
    """

    def __init__(self, every: Every, state: RunState, strategy: Strategy) -> None:
        self._every = every
        self._state = state
        self._strategy = strategy
        self._clock = Cadence(0, every.interval)
        self._clock.start(state.global_step)
        self._last_step = 0

    def is_due(self, last: bool) -> bool:
        """Whether a validation is due after this micro-batch; ``last``: it is the last one of its epoch."""
        state, every = self._state, self._every
        step = state.global_step
        ends_step = state.open_batches == 0 and step != self._last_step
        due = last and every.epochs > 0 and (state.epoch + 1) % every.epochs == 0
        if ends_step:
            self._last_step = step
            due = due or (every.steps > 0 and step % every.steps == 0)
            if step >= self._clock.next_look:
                due = self._clock.is_due(step, self._strategy) or due
        return due
