"""The hot path: fit -> epoch -> batch; update.py has what a batch goes through.  Hooks are looked up before the first one."""

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


class FitLoop:
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
        # limit_train_batches=0, or an earlier fit came to the limit; a resumed run may have been cut before its last hooks.
        self._idle = self.parts.feed.limit == 0 or not (self.parts.moments.resumed or self._goes_on())
        if self._idle:
            return
        state.scope = Scope.TRAIN_EPOCH
        # Within an epoch, what the hooks of its beginning log is among the values that were saved.
        self.metrics.muted = self.parts.moments.resumed and state.batch_idx > 0
        call_all(hooks("on_train_start"))
        epoch_start = hooks("on_train_epoch_start")
        # The order at the end of an epoch: reduction over ranks, callbacks, module, reduction of what these have logged, then those
        # that decide by the reduced values.
        epoch_end = hooks.callbacks("on_train_epoch_end", monitors=False) + hooks.module("on_train_epoch_end")
        monitors = hooks.callbacks("on_train_epoch_end", monitors=True)
        if state.batch_idx == 0:
            self._take_up()
        self.parts.agreement.begin()
        while self._goes_on() and not self._is_cut():
            self._open_epoch(epoch_start)
            whole = self._catch_up()
            complete = self._run_epoch() if whole is None else whole
            if state.cut:
                break
            if not complete:
                self.parts.moments.note_cut()
            self._close_epoch(complete, epoch_end, monitors)
        self.parts.moments.stay_ended()
        state.scope = Scope.NOWHERE
        if not state.interrupted:  # else the run that goes on delivers what is under way, where this one would have
            self._deliver()

    def _open_epoch(self, hooks: Calls) -> None:
        """What comes before the first batch of an epoch, or before the next one of an epoch that goes on."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.parts.moments.go_on()
        self.parts.renew(self.parts)
        set_epoch(self.parts.loader, state.epoch)
        before = self.parts.moments.callback_states("on_train_epoch_start") if state.batch_idx else None
        call_all(hooks)
        if before is not None:  # the epoch goes on: what they count of it is counted
            before.restore()
        self._follow_freezing()
        self.update.schedules.sort()

    def _close_epoch(self, complete: bool, hooks: Calls, monitors: Calls) -> None:
        """What comes behind the last batch of an epoch; only a complete one counts."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.metrics.reduce_train_epoch(state.global_step)
        call_all(hooks)
        self.metrics.end_train_epoch(state.global_step)
        if complete:
            self.update.schedules.end_epoch_monitored(state.epoch)
        state.epoch_ended, state.closed_at = complete, state.batches_done
        state.scope = Scope.NOWHERE  # what is logged now would be in no epoch
        call_all(monitors)
        if complete:
            state.epoch += 1
            state.batch_idx = 0
        state.epoch_ended = False

    def _deliver(self) -> None:
        """Acts on the outcomes and values of the last steps, which are under way yet."""
        if not self.state.should_stop:  # a limit, which the others have come to as well
            self.parts.strategy.end_steps()
        if self.update.outcomes is not None:
            self.update.outcomes.finish()
        self.metrics.drain()

    def end(self) -> None:
        """The hooks behind a training that was not interrupted."""
        if not self._idle:
            call_all(self.parts.hooks("on_train_end"))

    def _goes_on(self) -> bool:
        """Whether there is an epoch to run, or one to end that a resumed run was cut in behind its last step."""
        state = self.state
        begun = state.batch_idx > 0 and not 0 <= self._settings.max_epochs <= state.epoch
        return not self._done() or (begun and state.closed_at != state.batches_done)

    def _is_cut(self) -> bool:
        """Whether a signal that came since the last batch ends the run here."""
        return self.state.batches_done >= self.state.hold_at and self.parts.agreement.hold()

    def _follow_freezing(self) -> None:
        """Hooks may have frozen or unfrozen parameters; the strategy then wraps the step anew."""
        step = self.parts.strategy.rewrap_module(self._step)
        if step is not self._step:
            self._step = step
            self.update.use(step)
        # AccumulateGrad nodes, where autograd's graph ends.  A parameter has only a weak pointer to its own (grad_accumulator_), so
        # each step would make them anew, under the interpreter's lock.  Other kinds of parameters (quantised, sharded) may have no
        # view to find it by.
        trained = [one for one in self.parts.module.parameters() if type(one) is Parameter and one.requires_grad]
        self._accumulate_grad_nodes = [get_gradient_edge(one) for one in trained]

    def _take_up(self) -> None:
        """Once in a resumed run: its generators, and what the step before the cut has still to be followed by."""
        self.metrics.muted = False
        if self.parts.moments.take_up():
            self._after_step()

    def _catch_up(self) -> bool | None:
        """Does what a resumed run was cut before; returns None where batches follow, else whether those of the epoch are done."""
        state, feed = self.state, self.parts.feed
        self._take_up()
        if state.batch_idx == 0:
            return None
        at_end = feed.last or state.batch_idx >= feed.limit
        pending = self._validates and state.validated_at != state.batches_done and self._validation_is_due(at_end)
        if pending and self._validate():
            return False
        return at_end if self._done(in_epoch=True) else None

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether it came to the loader's end."""
        state, feed, update = self.state, self.parts.feed, self.update
        batch_end, run_batch = self._batch_end, update.run_batch
        starts, validates, limits = bool(self._batch_start), self._validates, self._settings
        state.scope = Scope.TRAIN_STEP
        # A resumed epoch may have been saved after its last batch: then there is nothing left but to end it.
        first, steps, last = state.batch_idx, state.global_step, state.batch_idx > 0
        update.begin_epoch(first)
        state.batches = enumerate(update.read(self.parts.together(feed.behind(first))), first)
        for batch_idx, batch in state.batches:
            state.batch, last = batch, feed.last
            if starts and self._skips(batch, batch_idx):
                last = True
                break
            outputs = run_batch(batch, batch_idx, last)
            if last:
                self._end_data(batch_idx + 1)
            # Counted before the hooks: a checkpoint that one of them writes goes on behind this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in batch_end:
                hook(outputs, batch, batch_idx)
            stepped = update.stepped
            if stepped and state.global_step >= self._due:
                self._after_step()
            if state.batches_done < state.committed:  # nothing comes between this step and the next
                update.stepped = False
                continue
            if validates and self._validation_is_due(last) and self._validate():
                last = False  # a run that goes on from here begins with this validation
                break
            update.stepped, bound = False, stepped or last
            full = state.should_stop or state.global_step >= limits.max_steps >= 0
            if bound and full and self._done(in_epoch=True):
                break
            state.passed = state.batches_done if bound else state.passed
            if state.batches_done >= state.hold_at and self.parts.agreement.hold():
                break
        self._check_fed(steps, ended=last and not first == state.batch_idx > 0)
        state.batch = state.batches = None
        return last

    def _end_data(self, batches: int, *, skipped: bool = False) -> None:
        """Once an epoch, at its last batch, or before the one that a hook ``skipped`` with the rest of the epoch."""
        if not skipped:
            self.parts.feed.finish()
        self.parts.meet_at_end_of_data(batches)
        if skipped:
            self.update.drop_window()
        self.update.end_epoch()

    def _skips(self, batch: Any, batch_idx: int) -> bool:
        """Runs every hook before the batch; returns whether one of them answered -1, which ends the epoch's data here."""
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
        """Raises where an epoch had no batch; warns, once, where it has ended with no step more than ``steps``, nor begun one."""
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
            why = f"its {self.state.batch_idx} batches are fewer than a window's, and partial_window='drop'"
        elif self.parts.module.automatic_optimization:
            why = "training_step returned None for each of its batches; return the loss"
        else:
            why = "training_step called no optimizer's step; call self.optimizers().step() in it"
        _LOG.warning("epoch %d ended without a step: %s", self.state.epoch + 1, why)

    def _done(self, *, in_epoch: bool = False) -> bool:
        """Whether training ends at this boundary: behind a step ``in_epoch``, or between two epochs."""
        state, settings, requests = self.state, self._settings, self.parts.requests
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
        """What is not to be done at every step: flushes and their arrival, the look at the clock."""
        step, deadline = self.state.global_step, self.parts.limits.deadline
        every = self._settings.log_every_n_steps or math.inf
        self.metrics.poll(step)
        if step % every == 0:
            self.metrics.flush(step)
            if self.update.outcomes is not None:
                self.update.outcomes.report_skips()
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
        if self.update.window_state() is None:
            self.parts.module.on_validation_model_zero_grad()
        # Callbacks of the validation see what the last step has logged; it waits for that step, once a validation.
        self.metrics.drain()
        self.metrics.reduce_steps(self.state.global_step)
        self.state.batch = None
        cut_short = validate()
        if not cut_short:
            self.state.validated_at = self.state.batches_done
        self.state.scope = Scope.TRAIN_STEP
        return cut_short
