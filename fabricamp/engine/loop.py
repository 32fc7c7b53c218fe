"""The hot path: fit -> epoch -> batch; update.py runs a single micro-batch.  Hooks are looked up before the first batch."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, cast

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from fabricamp.data import set_epoch
from fabricamp.engine.validation_cadence import ValidationCadence
from fabricamp.errors import ConfigError
from fabricamp.hooks import call_all
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import GradientEdge

    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.update import Update
    from fabricamp.hooks import Calls

_LOG = logging.getLogger("fabricamp")


class TrainingLoop:
    """Runs epochs until a limit or a stop, with validation and flushes in between."""

    def __init__(self, parts: FitParts, update: Update) -> None:
        self.parts = parts
        self.update = update
        self.state = parts.state
        self.metrics = parts.metrics
        self._step = parts.step
        self._batch_start = parts.hooks("on_train_batch_start")
        self._batch_end = parts.hooks("on_train_batch_end")
        self._settings = parts.limits.settings
        self._validates = parts.validate is not None
        times = parts.limits.validation_times
        by_times = None if times is None else ValidationCadence(times, parts.state, parts.strategy).is_due
        self._validation_is_due = by_times or self._due_by_batches
        self._due: float = 0
        self._accumulate_grad_nodes: list[GradientEdge] = []
        self._told_of_no_step = False
        self._idle = False

    def run(self) -> None:
        """Trains until a limit or a stop."""
        state, hooks = self.state, self.parts.hooks
        # Idle: limit_train_batches=0, or an earlier fit reached the limit.  A resumed run at its limit is not idle, as it may have
        # been cut before its last hooks.
        self._idle = self.parts.feed.limit == 0 or not (self.parts.resume_point.resumed or self._goes_on())
        if self._idle:
            return
        state.scope = Scope.TRAIN_EPOCH
        # Resumed within an epoch: the checkpoint has what on_train_start and on_train_epoch_start log; they must not log it twice.
        self.metrics.muted = self.parts.resume_point.resumed and state.batch_idx > 0
        call_all(hooks("on_train_start"))
        epoch_start = hooks("on_train_epoch_start")
        # Order at the end of an epoch: reduction over ranks, callbacks' hooks, the module's hook, reduction of the values logged by
        # these hooks, then the callbacks that decide by reduced values.
        epoch_end = hooks.callbacks("on_train_epoch_end", monitors=False) + hooks.module("on_train_epoch_end")
        monitors = hooks.callbacks("on_train_epoch_end", monitors=True)
        # At an epoch's beginning the saved RNG states precede its start hooks; within an epoch they follow them (_catch_up).
        if state.batch_idx == 0:
            self._restore_rng()
        self.parts.agreement.begin()
        while self._goes_on() and not self._is_cut():
            self._open_epoch(epoch_start)
            whole = self._catch_up()
            complete = self._run_epoch() if whole is None else whole
            if state.cut:
                break
            if not complete:
                self.parts.resume_point.note_cut()
            self._close_epoch(complete, epoch_end, monitors)
        self.parts.resume_point.restore_ended()
        state.scope = Scope.NOWHERE
        if not state.interrupted:  # else the resumed run delivers the pending values, at the same steps
            self._deliver()

    def _open_epoch(self, hooks: Calls) -> None:
        """Prepares an epoch and runs its start hooks: before its first batch, or before the next batch of a resumed epoch."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.parts.resume_point.begin_epoch()
        self.parts.renew(self.parts)
        set_epoch(self.parts.loader, state.epoch)
        before = self.parts.resume_point.callback_states("on_train_epoch_start") if state.batch_idx else None
        call_all(hooks)
        if before is not None:  # resumed epoch: the callbacks' states have counted its start already
            before.restore()
        self._follow_freezing()
        self.update.schedules.sort()

    def _close_epoch(self, complete: bool, hooks: Calls, monitors: Calls) -> None:
        """Reduces logged values and runs the end hooks after an epoch's last batch; only a complete epoch is counted."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.metrics.reduce_train_epoch(state.global_step)
        call_all(hooks)
        self.metrics.end_train_epoch(state.global_step)
        if complete:
            self.update.schedules.end_epoch_monitored(state.epoch)
        state.epoch_ended, state.closed_at = complete, state.batches_done
        state.scope = Scope.NOWHERE  # values logged from here on would belong to no epoch
        call_all(monitors)
        if complete:
            state.epoch += 1
            state.batch_idx = 0
        state.epoch_ended = False

    def _deliver(self) -> None:
        """Waits for the step statuses and logged values of the last steps, and acts on them."""
        if not self.state.should_stop:  # a limit ended the run, which the other ranks have reached too
            self.parts.strategy.end_steps()
        if self.update.overflow_policy is not None:
            self.update.overflow_policy.finish()
        self.metrics.drain()

    def end(self) -> None:
        """Runs ``on_train_end``, unless there was nothing to train; not called for an interrupted run."""
        if not self._idle:
            call_all(self.parts.hooks("on_train_end"))

    def _goes_on(self) -> bool:
        """Whether there is an epoch to run, or to finish: a resumed run may have been cut after an epoch's last step."""
        state = self.state
        begun = state.batch_idx > 0 and not 0 <= self._settings.max_epochs <= state.epoch
        return not self._done() or (begun and state.closed_at != state.batches_done)

    def _is_cut(self) -> bool:
        """Whether a signal received since the last batch ends the run here."""
        return self.state.batches_done >= self.state.hold_at and self.parts.agreement.hold()

    def _follow_freezing(self) -> None:
        """Lets the strategy rewrap the step if hooks have frozen or unfrozen parameters."""
        step = self.parts.strategy.rewrap_module(self._step)
        if step is not self._step:
            self._step = step
            self.update.use(step)
        # Keeps AccumulateGrad nodes, the leaves of autograd's graph, alive: a parameter has only a weak pointer to its node
        # (grad_accumulator_), so each step would create the nodes again, holding the GIL.  Other types of parameters (quantised,
        # sharded) may have no view through which to find the node.
        trained = [one for one in self.parts.module.parameters() if type(one) is Parameter and one.requires_grad]
        self._accumulate_grad_nodes = [get_gradient_edge(one) for one in trained]

    def _restore_rng(self) -> None:
        """In a resumed run, once: restores RNG states, and calls ``_after_step`` if the run was cut between a step and the call."""
        self.metrics.muted = False
        if self.parts.resume_point.restore_rng_once():
            self._after_step()

    def _catch_up(self) -> bool | None:
        """Does the work that the run was cut before; returns None if batches follow, else whether all of the epoch's are done."""
        state, feed = self.state, self.parts.feed
        self._restore_rng()
        if state.batch_idx == 0:
            return None
        at_end = feed.last or state.batch_idx >= feed.limit
        pending = self._validates and state.validated_at != state.batches_done and self._validation_is_due(at_end)
        if pending and self._validate():
            return False
        return at_end if self._done(in_epoch=True) else None

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether the loader's end was reached."""
        state, feed, update = self.state, self.parts.feed, self.update
        batch_end, run_batch = self._batch_end, update.run_batch
        starts, validates, limits = bool(self._batch_start), self._validates, self._settings
        state.scope = Scope.TRAIN_STEP
        # A resumed epoch may have been saved after its last batch: then no batch is left, and the epoch only has to be finished.
        first, steps, last = state.batch_idx, state.global_step, state.batch_idx > 0
        update.begin_epoch(first)
        state.batches = enumerate(update.read(self.parts.together(feed.starting_at(first))), first)
        for batch_idx, batch in state.batches:
            state.batch, last = batch, feed.last
            if starts and self._skips(batch, batch_idx):
                last = True
                break
            outputs = run_batch(batch, batch_idx, last)
            if last:
                self._end_data(batch_idx + 1)
            # Counted before the hooks: a run resumed from a checkpoint that a hook writes continues after this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in batch_end:
                hook(outputs, batch, batch_idx)
            stepped = update.stepped
            if stepped and state.global_step >= self._due:
                self._after_step()
            if state.batches_done < state.committed:  # the next step is in the same launch: nothing runs in between
                update.stepped = False
                continue
            if validates and self._validation_is_due(last) and self._validate():
                last = False  # the validation was cut short: a resumed run begins with it
                break
            update.stepped, bound = False, stepped or last
            full = state.should_stop or state.global_step >= limits.max_steps >= 0
            if bound and full and self._done(in_epoch=True):
                break
            state.passed = state.batches_done if bound else state.passed
            if state.batches_done >= state.hold_at and self.parts.agreement.hold():
                break
        # No warning for a resumed epoch: its steps may lie before the cut.
        self._check_fed(steps, ended=last and first == 0)
        state.batch = state.batches = None
        return last

    def _end_data(self, batches: int, *, skipped: bool = False) -> None:
        """Ends an epoch's data, once: at its last batch, or before a batch that a hook ``skipped`` with the rest of the epoch."""
        if not skipped:
            self.parts.feed.finish()
        self.parts.meet_at_end_of_data(batches)
        if skipped:
            self.update.drop_window()
        self.update.end_epoch()

    def _skips(self, batch: Any, batch_idx: int) -> bool:
        """Runs every ``on_train_batch_start``; returns whether one of them returned -1, which ends the epoch's data here."""
        skips = False
        for hook in self._batch_start:
            skips = hook(batch, batch_idx) == -1 or skips
        if skips and self.state.batches_done < self.state.committed:
            raise ConfigError(
                "on_train_batch_start answered -1, and the rest of a launch of several steps cannot be skipped; let the callback's "
                "holds_at name the step before, or give CudaGraph(steps=1)"
            )
        if skips:
            self._end_data(batch_idx + 1, skipped=True)
        return skips

    def _check_fed(self, steps: int, *, ended: bool) -> None:
        """Raises if the epoch had no batch; warns, once, if it ended with no step beyond ``steps`` and no accumulation begun."""
        if self.state.batch is None and not self.state.batch_idx:
            raise ConfigError(
                f"the train loader gave no batch in epoch {self.state.epoch}; check the data set and the batch size (an iterator "
                "is used up after one pass: give a loader that can be iterated again)"
            )
        trained = self.state.global_step > steps or self.state.open_batches > 0
        if trained or not ended or self._told_of_no_step or self.parts.strategy.rank:
            return
        self._told_of_no_step = True
        if not self.state.batch_idx:
            why = "on_train_batch_start returned -1 before its first batch"
        elif self._settings.partial_window == "drop" and self.state.batch_idx < self._settings.accumulate_grad_batches:
            why = f"its {self.state.batch_idx} batches are too few for a step, and partial_window='drop'"
        elif self.parts.module.automatic_optimization:
            why = "training_step returned None for each of its batches; return the loss"
        else:
            why = "training_step called no optimizer's step; call self.optimizers().step() in it"
        _LOG.warning("epoch %d ended without a step: %s", self.state.epoch + 1, why)

    def _done(self, *, in_epoch: bool = False) -> bool:
        """Whether training ends at this boundary: after a step (``in_epoch``), or between two epochs."""
        state, settings, requests = self.state, self._settings, self.parts.requests
        # The boundary between two epochs comes after that of the last step, and before the next step's.
        boundary = state.batches_done + (0.0 if in_epoch else 0.5)
        if state.global_step >= settings.max_steps >= 0 or (state.epoch >= settings.max_epochs >= 0 and not in_epoch):
            return True
        if state.should_stop:
            if state.cut:
                return True
            if state.global_step < settings.min_steps or state.epoch < settings.min_epochs:
                requests.spread()
            elif state.agreed or requests.all_ask(boundary):
                return True
        state.passed = boundary
        return False

    def _after_step(self) -> None:
        """Does what most steps skip: takes values that have arrived, starts a flush, checks the deadline."""
        step, deadline = self.state.global_step, self.parts.limits.deadline
        every = self._settings.log_every_n_steps or math.inf
        self.metrics.poll(step)
        if step % every == 0:
            self.metrics.flush(step)
            if self.update.overflow_policy is not None:
                self.update.overflow_policy.report_skips()
        self._due = min(self.metrics.due, step - step % every + every)
        if deadline is not None:
            self._due = step + 1
            if time.monotonic() >= deadline:
                self.state.ask("max_time")

    def _due_by_batches(self, last: bool) -> bool:
        limits, state, every_epochs = self.parts.limits, self.state, self._settings.check_val_every_n_epoch
        if every_epochs is None:
            return state.batches_done % limits.validate_every == 0
        if (state.epoch + 1) % every_epochs:
            return False
        return last if limits.validate_every == float("inf") else state.batch_idx % limits.validate_every == 0

    def _validate(self) -> bool:
        """Runs validation; returns whether a stop cut it short."""
        validate = cast("Callable[[], bool]", self.parts.validate)
        if self.update.window_state() is None:  # else the gradients of an accumulation in progress are still needed
            self.parts.module.on_validation_model_zero_grad()
        # Validation callbacks see what the last step logged; this waits for that step, once per validation.
        self.metrics.drain()
        self.metrics.reduce_steps(self.state.global_step)
        self.state.batch = None
        cut_short = validate()
        if not cut_short:
            self.state.validated_at = self.state.batches_done
        self.state.scope = Scope.TRAIN_STEP
        return cut_short
