"""Acts on step statuses: schedules follow applied steps, skipped steps are reported, the overflow policy ends a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fabricamp.errors import NonFiniteError
from fabricamp.precision import StepStatus
from fabricamp.precision.loss_scaler import PATIENCE
from fabricamp.precision.step_results import StepResults
from fabricamp.state import NON_FINITE, RunState
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from fabricamp.engine.schedules import Schedules

logger = logging.getLogger("fabricamp")


class OverflowPolicy:
    """Acts on the step statuses of a Precision that may skip steps; every rank reads the same status at the same step."""

    def __init__(self, verdicts: StepResults, schedules: Schedules, state: RunState, strategy: Strategy) -> None:
        self.launch_close = verdicts.launch_close
        """Ends a step on the device; takes the step's loss."""
        self._verdicts = verdicts
        self._schedules_follow = verdicts.schedules_follow and schedules.follow_steps
        self._schedules = schedules
        self._state = state
        self._strategy = strategy
        self._unreported_skips = 0

    def note_closed(self) -> None:
        """Counts a step, whose end is launched already, and acts on the status of the step two before it."""
        verdict = self._verdicts.note_closed()
        if verdict is None:
            return
        if not verdict.applied:
            self._note_skip(verdict)
        elif self._schedules_follow:
            self._schedules.advance(verdict.applied_steps)

    def _note_skip(self, verdict: StepStatus) -> None:
        if verdict.ends_run:
            self._end_run()
            return
        self._unreported_skips += 1
        if verdict.skipped_steps == 1:
            self.report_skips()

    def finish(self) -> None:
        """After the last batch: reports overflows that no step has reported, and ends the run for them if it has to."""
        skipped = [verdict for verdict in self._verdicts.drain() if not verdict.applied]
        ending = any(verdict.ends_run for verdict in skipped)
        self._unreported_skips += 0 if ending else len(skipped)
        self.report_skips()
        if ending:
            self._end_run()

    def _end_run(self) -> None:
        """Stops the run or raises, at the same step on every rank: all have read the same step status."""
        state, policy = self._state, self._verdicts.policy
        if state.stop_reason == NON_FINITE:
            return
        explanation = self._verdicts.explain(state.global_step)
        if policy == "stop":
            explanation = (
                f"training stopped at step {state.global_step}: {explanation}; weights are those from before it"
            )
            state.stop(NON_FINITE, explanation)
        elif policy == "raise":
            raise NonFiniteError(
                f"{explanation}; weights are those from before it. Look for the operation with detect_anomaly=True, lower the "
                "learning rate, or skip such steps with nan_policy='skip'"
            )
        else:
            raise NonFiniteError(
                f"{PATIENCE} steps in a row were skipped at the lowest loss scale ({self._verdicts.scale:g}): {explanation}. "
                "Look for what is too large in data or loss, lower the learning rate, or train in bf16 ('O4', 'O5') or 'O0'"
            )

    def report_skips(self) -> None:
        """Logs how many steps were skipped for overflow since the last report."""
        if self._unreported_skips and self._strategy.rank == 0:
            verdicts, count = self._verdicts, self._unreported_skips
            moving = (
                f"; the loss scale is {verdicts.scale:g} now, which finds its size by such steps: a few are no fault"
            )
            logger.warning(
                "%s skipped, as gradients were not finite (%d in all%s)",
                "1 step was" if count == 1 else f"{count} steps were",
                verdicts.skipped_steps,
                moving if verdicts.dynamic else "",
            )
        self._unreported_skips = 0
