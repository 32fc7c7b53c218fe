"""The training loop: fit -> epoch -> micro-batch; ``update.py`` runs a single micro-batch.

In reading order: :meth:`TrainingLoop.run` with the beginning and the end of an epoch; ``_run_epoch``, which is the hot path; then
the work that most steps skip (validation, flushes) and the conditions that end training.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, cast

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from fabricamp._utils import lightning_alias
from fabricamp.data import set_epoch
from fabricamp.engine.validation_cadence import ValidationCadence
from fabricamp.errors import ConfigError
from fabricamp.hooks import call_all, call_hook
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import GradientEdge

    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.update import Update
    from fabricamp.hooks import Calls

_LOG = logging.getLogger("fabricamp")


class TrainingLoop:
    """Runs epochs until a limit or a stop, with validation and flushes in between; looks up hooks before the first batch."""

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
        self._validation_is_due = self._due_by_batches
        self._validation_is_counted = self._due_by_batches
        times = parts.limits.validation_times
        if times is not None:
            epochs = self._settings.check_val_every_n_epoch or 1
            cadence = ValidationCadence(times, epochs, parts.state, parts.strategy)
            self._validation_is_due = cadence.is_due
            self._validation_is_counted = cadence.follows
        self._work_due_at: float = 0
        """The step from which :meth:`_after_step` has something to do."""
        self._accumulate_grad_nodes: list[GradientEdge] = []
        self._warned_of_no_step = False
        self._idle = False

    def run(self) -> None:
        """Trains until a limit or a stop."""
        state = self.state
        hooks = self.parts.hooks
        resume_point = self.parts.resume_point
        # Idle: limit_train_batches=0, or an earlier fit reached the limit.  A resumed run at its limit is not idle, as it may have
        # been cut before its last hooks.
        self._idle = self.parts.feed.limit == 0 or not (resume_point.resumed or self._epochs_remain())
        if self._idle:
            return
        state.scope = Scope.TRAIN_EPOCH
        # Resumed within an epoch: the checkpoint has what on_train_start and on_train_epoch_start log; they must not log it twice.
        self.metrics.muted = resume_point.resumed and state.batch_idx > 0
        call_all(hooks("on_train_start"))
        epoch_start = hooks("on_train_epoch_start")
        # Order at the end of an epoch: reduction over ranks, callbacks' hooks, the module's hook, reduction of the values logged by
        # these hooks, then the callbacks that decide by reduced values.
        epoch_end = hooks.callbacks("on_train_epoch_end", monitors=False) + hooks.module("on_train_epoch_end")
        monitors = hooks.callbacks("on_train_epoch_end", monitors=True)
        # RNG states saved at an epoch's beginning are from before its start hooks, those saved within it from after (_catch_up).
        if state.batch_idx == 0:
            self._restore_rng()
        self.parts.agreement.begin()
        while self._epochs_remain() and not self._interrupted_between_epochs():
            self._begin_epoch(epoch_start)
            complete = self._catch_up()
            if complete is None:
                complete = self._run_epoch()
            if state.cut:  # the resumed run finishes this epoch, and calls the hooks of its end
                break
            if not complete:
                resume_point.note_cut()
            self._end_epoch(complete, epoch_end, monitors)
        resume_point.restore_ended()
        state.scope = Scope.NOWHERE
        if not state.interrupted:  # else the resumed run delivers the pending values, at the same steps
            self._finish_last_steps()

    def end(self) -> None:
        """Runs ``on_train_end``, unless there was nothing to train; not called for an interrupted run."""
        if not self._idle:
            call_all(self.parts.hooks("on_train_end"))

    def _epochs_remain(self) -> bool:
        """Whether there is an epoch to run, or to finish: a resumed run may have been cut after an epoch's last step."""
        state = self.state
        if not self._done():
            return True
        max_epochs = self._settings.max_epochs
        within_epoch = state.batch_idx > 0 and (max_epochs < 0 or state.epoch < max_epochs)
        end_hooks_have_run = state.closed_at == state.batches_done
        return within_epoch and not end_hooks_have_run

    def _interrupted_between_epochs(self) -> bool:
        """Whether a signal received since the last batch ends the run here."""
        return self.state.batches_done >= self.state.hold_at and self.parts.agreement.hold()

    # -- an epoch ----------------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, hooks: Calls) -> None:
        """Prepares an epoch and runs its start hooks: before its first batch, or before the next batch of a resumed epoch."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.parts.resume_point.begin_epoch()
        self.parts.renew(self.parts)
        set_epoch(self.parts.loader, state.epoch)
        if state.batch_idx == 0:
            call_all(hooks)
        else:
            # In a resumed epoch the callbacks' states already include the epoch's start hooks.
            states = self.parts.resume_point.callback_states("on_train_epoch_start")
            call_all(hooks)
            states.restore()
        self._follow_freezing()
        self.update.schedules.sort()

    def _follow_freezing(self) -> None:
        """Lets the strategy rewrap the step if hooks have frozen or unfrozen parameters."""
        step = self.parts.strategy.rewrap_module(self._step)
        if step is not self._step:
            self._step = step
            self.update.use(step)
        # Keeps AccumulateGrad nodes, the leaves of autograd's graph, alive: a parameter has only a weak pointer to its node
        # (grad_accumulator_), so each step would create the nodes again, holding the GIL.  Other types of parameters (quantised,
        # sharded) may have no view through which to find the node.
        self._accumulate_grad_nodes = [
            get_gradient_edge(parameter)
            for parameter in self.parts.module.parameters()
            if type(parameter) is Parameter and parameter.requires_grad
        ]

    def _catch_up(self) -> bool | None:
        """Does the work left when the run was cut; returns None if batches follow, else whether all of the epoch's are done."""
        state = self.state
        feed = self.parts.feed
        self._restore_rng()
        if state.batch_idx == 0:
            return None
        at_end = feed.last or state.batch_idx >= feed.limit
        validated = state.validated_at == state.batches_done
        if self._validates and not validated and self._validation_is_due(at_end) and self._validate():
            return False
        return at_end if self._done(in_epoch=True) else None

    def _restore_rng(self) -> None:
        """In a resumed run, once: restores RNG states, and calls ``_after_step`` if the run was cut between a step and the call."""
        self.metrics.muted = False
        if self.parts.resume_point.restore_rng_once():
            self._after_step()

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether the epoch is complete: no batch of it is left.

        The pass ends in one of five ways: the loader has no more batches, a hook skips the others, a validation is cut short, a
        limit or a request ends training after a step, or a signal ends it after any micro-batch.
        """
        state = self.state
        settings = self._settings
        feed = self.parts.feed
        update = self.update
        state.scope = Scope.TRAIN_STEP
        first = state.batch_idx
        steps_before = state.global_step
        update.begin_epoch(first)
        state.batches = enumerate(update.read(self.parts.together(feed.starting_at(first))), first)
        # A resumed epoch may have been saved after its last batch: then no batch is left, and the epoch only has to be finished.
        last = first > 0
        for batch_idx, batch in state.batches:
            state.batch = batch
            last = feed.last
            if self._batch_start and self._skips(batch, batch_idx):
                last = True  # the epoch is complete without this batch and those after it
                break
            outputs = update.run_batch(batch, batch_idx, last)
            if last:
                self._end_data(batch_idx + 1)
            # Counted before the hooks: a run resumed from a checkpoint that a hook writes continues after this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in self._batch_end:
                hook(outputs, batch, batch_idx)
            stepped = update.stepped
            if stepped and state.global_step >= self._work_due_at:
                self._after_step()
            if state.batches_done < state.committed:  # the next step is in the same launch: nothing runs in between
                update.stepped = False
                continue
            if self._validates and self._validation_is_due(last) and self._validate():
                last = False  # the validation was cut short: a resumed run begins with it
                break
            # A checkpoint written before this line marks this step's work as unfinished: a resumed run does it first
            # (_restore_rng).
            update.stepped = False
            if stepped or last:
                # A limit or a request (should_stop, on any rank) ends training only where a step has ended, or the epoch.
                at_max_steps = 0 <= settings.max_steps <= state.global_step
                if (at_max_steps or state.should_stop) and self._done(in_epoch=True):
                    if not (at_max_steps or state.cut) and lightning_alias.is_installed():
                        self._end_as_in_lightning()
                    break
                state.passed = state.batches_done
            # A signal may end training within an accumulation, too: after the micro-batch that the ranks have agreed on.
            if state.batches_done >= state.hold_at and self.parts.agreement.hold():
                break
        # No warning for a resumed epoch: its steps may have been made before the cut.
        self._check_epoch(steps_before, ended=last and first == 0)
        state.batch = None
        state.batches = None
        return last

    def _skips(self, batch: Any, batch_idx: int) -> bool:
        """Runs every ``on_train_batch_start``; returns whether one of them returned -1, which skips the rest of the epoch."""
        skips = False
        for hook in self._batch_start:
            skips = hook(batch, batch_idx) == -1 or skips
        if skips and self.state.batches_done < self.state.committed:
            raise ConfigError(
                "on_train_batch_start returned -1, and the rest of a launch of several steps cannot be skipped; let the callback's "
                "holds_at return the step before, or give CudaGraph(steps=1)"
            )
        if skips:
            self._end_data(batch_idx + 1, skipped=True)
        return skips

    def _end_data(self, batches: int, *, skipped: bool = False) -> None:
        """Ends an epoch's data, once: at its last batch, or before a batch that a hook ``skipped`` with the rest of the epoch."""
        if not skipped:
            self.parts.feed.finish()
        self.parts.meet_at_end_of_data(batches)
        if skipped:
            self.update.drop_accumulation()
        self.update.end_epoch()

    def _check_epoch(self, steps_before: int, *, ended: bool) -> None:
        """Raises if the epoch had no batch; warns, once, if it ``ended`` with no step made and no accumulation begun."""
        state = self.state
        if state.batch is None and not state.batch_idx:
            raise ConfigError(
                f"the train loader gave no batch in epoch {state.epoch}; check the data set and the batch size (an iterator "
                "is used up after one pass: give a loader that can be iterated again)"
            )
        trained = state.global_step - self.update.empty_steps > steps_before or state.open_batches > 0
        if trained or not ended or self._warned_of_no_step or self.parts.strategy.rank:
            return
        self._warned_of_no_step = True
        if not state.batch_idx:
            why = "on_train_batch_start returned -1 before its first batch"
        elif self._settings.partial_window == "drop" and state.batch_idx < self._settings.accumulate_grad_batches:
            why = f"its {state.batch_idx} batches are too few for a step, and partial_window='drop'"
        elif self.parts.module.automatic_optimization:
            why = "training_step returned None for each of its batches; return the loss"
        else:
            why = "training_step called no optimizer's step; call self.optimizers().step() in it"
        _LOG.warning("epoch %d ended without a step: %s", state.epoch + 1, why)

    def _end_epoch(self, complete: bool, hooks: Calls, monitors: Calls) -> None:
        """Reduces logged values and runs the end hooks after an epoch's last batch; only a complete epoch is counted."""
        state = self.state
        state.scope = Scope.TRAIN_EPOCH
        self.metrics.reduce_train_epoch(state.global_step)
        call_all(hooks)
        self.metrics.end_train_epoch(state.global_step)
        if complete:
            self.update.schedules.end_epoch_monitored(state.epoch)
        state.epoch_ended = complete
        state.closed_at = state.batches_done
        state.scope = Scope.NOWHERE  # values logged from here on would belong to no epoch
        call_all(monitors)
        if complete:
            state.epoch += 1
            state.batch_idx = 0
        state.epoch_ended = False

    # -- after some steps --------------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        """Does what most steps skip: takes values that have arrived, starts a flush, checks the deadline."""
        step = self.state.global_step
        deadline = self.parts.limits.deadline
        every = self._settings.log_every_n_steps or math.inf
        self.metrics.poll(step)
        if step % every == 0:
            self.metrics.flush(step)
            if self.update.overflow_policy is not None:
                self.update.overflow_policy.report_skips()
        self._work_due_at = min(self.metrics.due, step - step % every + every)
        if deadline is not None:
            self._work_due_at = step + 1
            if time.monotonic() >= deadline:
                self.state.ask("max_time")

    def _due_by_batches(self, last: bool) -> bool:
        """Whether a validation is due after this micro-batch, by a number of batches; ``last``: it is the epoch's last one."""
        state = self.state
        every = self.parts.limits.validate_every
        every_epochs = self._settings.check_val_every_n_epoch
        if every_epochs is None:  # counted over the epochs
            return state.batches_done % every == 0
        if (state.epoch + 1) % every_epochs:
            return False
        if every == math.inf:  # the loader has no length
            return last
        return state.batch_idx % every == 0

    def validation_follows(self) -> bool:
        """Whether a validation follows the present micro-batch (for its end hooks); leaves out validations that are due by time."""
        return self._validates and self._validation_is_counted(self.parts.feed.last)

    def _validate(self) -> bool:
        """Runs validation; returns whether a stop cut it short."""
        validate = cast("Callable[[], bool]", self.parts.validate)
        if (
            self.update.accumulation_state() is None
        ):  # else the gradients of an accumulation in progress are still needed
            call_hook(self.parts.module, "on_validation_model_zero_grad")
        elif not self.parts.module.automatic_optimization:
            lightning_alias.say_difference("gradients accumulated by hand stay at a validation; Lightning drops them")
        # Validation callbacks see what the last step logged; this waits for that step, once per validation.
        self.metrics.drain()
        self.metrics.reduce_steps(self.state.global_step)
        self.state.batch = None
        cut_short = validate()
        if not cut_short:
            self.state.validated_at = self.state.batches_done
        self.state.scope = Scope.TRAIN_STEP
        return cut_short

    def _end_as_in_lightning(self) -> None:
        """Logs the last step's values and validates, if ``should_stop`` ends training within an epoch."""
        state = self.state
        every = self._settings.log_every_n_steps
        if every and state.global_step % every:  # else they are logged already
            self.metrics.flush(state.global_step)
        every_epochs = self._settings.check_val_every_n_epoch or 1
        is_validated = state.validated_at == state.batches_done
        if self._validates and not is_validated and (state.epoch + 1) % every_epochs == 0:
            self._validate()

    def _done(self, *, in_epoch: bool = False) -> bool:
        """Whether training ends at this boundary: after a step (``in_epoch``), or between two epochs.

        If not, notes that this rank has passed the boundary.
        """
        state = self.state
        settings = self._settings
        requests = self.parts.requests
        # The boundary between two epochs comes after that of the last step, and before the next step's.
        boundary = state.batches_done + (0.0 if in_epoch else 0.5)
        if 0 <= settings.max_steps <= state.global_step:
            return True
        # This limit ends no epoch, even if it was lowered within one.
        if not in_epoch and 0 <= settings.max_epochs <= state.epoch:
            return True
        if state.should_stop:
            if state.cut:  # a signal or nan_policy="stop": every rank stops here, without another agreement
                return True
            if state.global_step < settings.min_steps or state.epoch < settings.min_epochs:
                requests.spread()
                lightning_alias.say_difference(
                    "steps while a stop waits for min_steps or min_epochs are logged every log_every_n_steps; Lightning logs each"
                )
            elif state.agreed or requests.all_ask(boundary):
                return True
        state.passed = boundary
        return False

    def _finish_last_steps(self) -> None:
        """Waits for the step statuses and logged values of the last steps, and acts on them."""
        if not self.state.should_stop:  # a limit ended the run, which the other ranks have reached too
            self.parts.strategy.membership.end_steps()
        if self.update.overflow_policy is not None:
            self.update.overflow_policy.finish()
        self.metrics.drain()
