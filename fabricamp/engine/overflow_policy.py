"""Acts on step statuses: advances schedules by applied steps, reports skipped steps, ends a run on overflow (``nan_policy``)."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from fabricamp.errors import NonFiniteError
from fabricamp.precision.loss_scaler import PATIENCE
from fabricamp.precision.step_results import StepResults
from fabricamp.state import NON_FINITE, RunState
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp.engine.schedules import Schedules
    from fabricamp.precision.loss_scaler import StepStatus

logger = logging.getLogger("fabricamp")


class OverflowPolicy:
    """Acts on the step statuses of a Precision that may skip steps; every rank reads the same status at the same step.

    ``losses``: each step hands its loss to :attr:`launch_end`, as in automatic optimization.
    """

    def __init__(
        self, step_results: StepResults, schedules: Schedules, state: RunState, strategy: Strategy, *, losses: bool
    ) -> None:
        self.launch_end = step_results.launch_end
        """Ends a step on the device; takes the step's loss."""
        self._step_results = step_results
        self._schedules_follow = step_results.schedules_follow and schedules.follow_steps
        self._schedules = schedules
        self._state = state
        self._strategy = strategy
        self._unreported_skips = 0
        self._looks_at_losses = losses and strategy.rank == 0
        self.inherited_are_counted = False
        """Whether the schedules know of the steps whose statuses a checkpoint has left to this run."""

    def note_end(self) -> None:
        """Counts a step, whose end is launched already, and acts on the status of the step two before it."""
        status = self._step_results.note_end()
        if status is None:
            return
        if status.applied:
            if self._schedules_follow and not (self.inherited_are_counted and self._is_inherited()):
                self._schedules.advance(status.applied_steps)
        elif status.ends_run:
            self._end_run()
        elif not self._is_inherited():
            self._unreported_skips += 1
            if status.skipped_steps == 1:  # the first one is reported at once, the others at the loop's reports
                self.report_skips()

    def _is_inherited(self) -> bool:
        """Whether the last status is of a step before the checkpoint that the run continues."""
        # A precision of the user's own may not say so.
        return getattr(self._step_results, "known_is_inherited", False)

    def finish(self) -> None:
        """After the last batch: reports overflows not reported yet, and ends the run if one of them requires it."""
        statuses = self._step_results.drain()
        ends_run = any(status.ends_run for status in statuses)
        if not ends_run:
            own = statuses[getattr(self._step_results, "inherited_pending", 0) :]
            self._unreported_skips += sum(not status.applied for status in own)
            self._look_at(own)
        self.report_skips()
        if ends_run:
            self._end_run()

    def _end_run(self) -> None:
        """Stops the run or raises, at the same step on every rank: all have read the same step status."""
        state = self._state
        policy = self._step_results.policy
        if state.stop_request.reason == NON_FINITE:  # stopped already; this status is of a step launched before
            return
        explanation = self._step_results.explain(state.global_step)
        if policy == "stop":
            explanation = (
                f"training stopped at step {state.global_step}: {explanation}; the weights are from before that step"
            )
            state.stop(NON_FINITE, explanation)
        elif policy == "raise":
            raise NonFiniteError(
                f"{explanation}; the weights are from before that step. Look for the operation with detect_anomaly=True, "
                "lower the learning rate, or skip such steps with nan_policy='skip'"
            )
        else:
            raise NonFiniteError(
                f"{PATIENCE} steps in a row were skipped at the lowest loss scale ({self._step_results.scale:g}): {explanation}. "
                "Look for what is too large in data or loss, lower the learning rate, or train in bf16 ('O4', 'O5') or 'O0'"
            )

    def report(self) -> None:
        """Logs how many steps were skipped since the last report, and looks at the loss of the last step whose status is known."""
        self.report_skips()
        known = getattr(self._step_results, "scaler", None)
        if known is not None and known.known.applied_steps and not self._step_results.known_is_inherited:
            self._look_at([known.known])

    def _look_at(self, statuses: Iterable[StepStatus]) -> None:
        """Tells, once, of a loss that is not finite in a step that was applied: its gradients were finite."""
        if not self._looks_at_losses:
            return
        lost = next((one.loss for one in statuses if one.applied and not math.isfinite(one.loss)), None)
        if lost is None:
            return
        self._looks_at_losses = False
        logger.warning(
            "the loss was %g at step %d or just before, while all gradients were finite, and training continues: a part of the "
            "loss on which no parameter depends is not finite, or one that the backward leaves out, as torch.where does",
            lost,
            self._state.global_step,
        )

    def report_skips(self) -> None:
        """Logs how many steps were skipped for overflow since the last report."""
        if self._unreported_skips and self._strategy.rank == 0:
            results = self._step_results
            count = self._unreported_skips
            if results.dynamic and results.at_lowest_scale:
                scaling = (
                    f"; the loss scale is {results.scale:g}, its lowest: look for what is too large in data or loss"
                )
            elif results.dynamic:
                scaling = f"; the loss scale was lowered to {results.scale:g}; dynamic scaling skips a few steps to find its value"
            else:
                scaling = ""
            logger.warning(
                "%s skipped: gradients were not finite (%d in all%s)",
                "1 step was" if count == 1 else f"{count} steps were",
                results.skipped_steps,
                scaling,
            )
        self._unreported_skips = 0
