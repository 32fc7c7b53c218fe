"""The hot path: fit -> epoch -> batch; update.py has what a batch goes through.  Hooks are looked up before the first one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from fabricamp.data import set_epoch
from fabricamp.errors import ConfigError
from fabricamp.hooks import call_all
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import GradientEdge

    from fabricamp.parts import FitParts
    from fabricamp.update import Update

__all__ = ["FitLoop"]


class FitLoop:
    """Runs epochs until a limit or a stop, with validation and flushes in between."""

    def __init__(self, parts: FitParts, update: Update) -> None:
        self.parts = parts
        self.update = update
        self.state = parts.state
        self.metrics = parts.metrics
        self.limits = parts.limits
        self._step = parts.step
        self._batch_start = parts.hooks("on_train_batch_start")
        self._batch_end = parts.hooks("on_train_batch_end")
        self._max_steps = parts.limits.max_steps
        self._validates = parts.validate is not None
        self._due = 0
        self._gradient_edges: list[GradientEdge] = []

    def run(self) -> None:
        """Trains until a limit or a stop."""
        state, hooks = self.state, self.parts.hooks
        if self.parts.feed.limit == 0:  # limit_train_batches=0: nothing is trained
            return
        state.scope = Scope.TRAIN_EPOCH
        # Within an epoch, what the hooks of its beginning log is among the values that were saved.
        self.metrics.muted = self.parts.moments.resumed and state.batch_idx > 0
        call_all(hooks("on_train_start"))
        epoch_start = hooks("on_train_epoch_start")
        # The order at the end of an epoch: callbacks, module, reduction over ranks, then those that read the reduced values.
        epoch_end = hooks.callbacks("on_train_epoch_end", monitors=False) + hooks.module("on_train_epoch_end")
        monitors = hooks.callbacks("on_train_epoch_end", monitors=True)
        if state.batch_idx == 0:
            self._take_up()
        while not self._done():
            state.scope = Scope.TRAIN_EPOCH
            set_epoch(self.parts.loader, state.epoch)
            call_all(epoch_start)
            self._follow_freezing()
            complete = self._catch_up() and self._run_epoch()
            if not complete:
                self.parts.moments.note_cut()
            state.scope = Scope.TRAIN_EPOCH
            call_all(epoch_end)
            self.metrics.end_train_epoch(state.global_step)
            if complete:
                self.update.schedules.end_epoch_monitored(self.state.epoch)
            state.epoch_ended, state.scope = complete, Scope.NOWHERE  # what is logged now would be in no epoch
            call_all(monitors)
            if complete:
                state.epoch += 1
                state.batch_idx = 0
            state.epoch_ended = False
        self.update.finish()
        self.metrics.drain()
        call_all(hooks("on_train_end"))

    def _follow_freezing(self) -> None:
        """Hooks may have frozen or unfrozen parameters; the strategy then wraps the step anew."""
        step = self.parts.strategy.rewrap_module(self._step)
        if step is not self._step:
            self._step = step
            self.update.use(step)
        # The graph's ends at the parameters.  A step's graph is gone before the next one is built; unless somebody holds its ends,
        # they are made anew each time, and each takes the interpreter's lock for it.  Not every other kind of parameter has a view.
        trained = [one for one in self.parts.module.parameters() if type(one) is Parameter and one.requires_grad]
        self._gradient_edges = [get_gradient_edge(one) for one in trained]

    def _take_up(self) -> None:
        """Once in a resumed run: its generators, and what the step before the cut has still to be followed by."""
        self.metrics.muted = False
        if self.parts.moments.take_up():
            self._after_step()

    def _catch_up(self) -> bool:
        """Runs the validation that a resumed run was cut before; returns whether training goes on."""
        state, feed = self.state, self.parts.feed
        self._take_up()
        pending = state.batch_idx > 0 and self._validates and state.validated_at != state.batches_done
        if not pending or not self._validation_is_due(feed.last or state.batch_idx >= feed.limit):
            return True
        self._validate()
        return not self._done(in_epoch=True)

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether it came to the loader's end."""
        state, feed, update = self.state, self.parts.feed, self.update
        batch_end, run_batch, max_steps = self._batch_end, update.run_batch, self._max_steps
        starts, validates = bool(self._batch_start), self._validates
        state.scope = Scope.TRAIN_STEP
        first = state.batch_idx
        # A resumed epoch may have been saved after its last batch: then there is nothing left but to end it.
        last = first > 0
        for batch_idx, batch in enumerate(feed.behind(first), first):
            state.batch, last = batch, feed.last
            if starts and self._skips(batch, batch_idx):
                last = True
                update.drop_window()
                update.schedules.end_epoch(state.epoch)
                break
            outputs = run_batch(batch, batch_idx, last)
            if last:
                update.schedules.end_epoch(state.epoch)
            # Counted before the hooks: a checkpoint that one of them writes goes on behind this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in batch_end:
                hook(outputs, batch, batch_idx)
            stepped = update.stepped
            if stepped and state.global_step >= self._due:
                self._after_step()
            if validates and self._validation_is_due(last) and self._validate():
                last = False  # a run that goes on from here begins with this validation
                break
            if state.batches_done >= state.hold_at:
                self.parts.agreement.hold()
            if stepped or last:
                update.stepped = False
                if (state.should_stop or state.global_step >= max_steps) and self._done(in_epoch=True):
                    break
        self._check_fed()
        state.batch = None
        return last

    def _skips(self, batch: Any, batch_idx: int) -> bool:
        """Runs every hook before the batch; returns whether one of them answered -1: skip the rest of the epoch."""
        skips = False
        for hook in self._batch_start:
            skips = hook(batch, batch_idx) == -1 or skips
        return skips

    def _check_fed(self) -> None:
        if self.state.batch is None and not self.state.batch_idx:
            raise ConfigError(
                f"the train loader gave no batch in epoch {self.state.epoch}; check the data set and the batch size (an iterator "
                "is used up after one pass: give a loader that can be iterated again)"
            )

    def _done(self, *, in_epoch: bool = False) -> bool:
        state, limits = self.state, self.limits
        if state.global_step >= limits.max_steps or (state.epoch >= limits.max_epochs and not in_epoch):
            return True
        if not state.should_stop:
            return False
        return state.stops_at_once or (state.global_step >= limits.min_steps and state.epoch >= limits.min_epochs)

    def _after_step(self) -> None:
        """What is not to be done at every step: flushes and their arrival, the look at the clock."""
        step, limits = self.state.global_step, self.limits
        self.metrics.poll(step)
        if step % limits.log_every == 0:
            self.metrics.flush(step)
            self.update.report_skips()
        self._due = min(self.metrics.due, step - step % limits.log_every + limits.log_every)
        if limits.deadline is not None:
            self._due = step + 1
            if time.monotonic() >= limits.deadline:
                self.parts.agreement.request("max_time")

    def _validation_is_due(self, last: bool) -> bool:
        limits, state = self.limits, self.state
        if limits.validate_every_epochs is None:
            return state.batches_done % limits.validate_every == 0
        if (state.epoch + 1) % limits.validate_every_epochs:
            return False
        return last if limits.validate_every == float("inf") else state.batch_idx % limits.validate_every == 0

    def _validate(self) -> bool:
        """Runs validation; returns whether a stop cut it short."""
        validate = cast("Callable[[], bool]", self.parts.validate)
        if self.update.window_state() is None:
            self.parts.module.on_validation_model_zero_grad()
        self.state.batch = None
        cut_short = validate()
        if not cut_short:
            self.state.validated_at = self.state.batches_done
        self.state.scope = Scope.TRAIN_STEP
        return cut_short
