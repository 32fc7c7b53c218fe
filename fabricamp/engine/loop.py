"""The training loop: fit -> epoch -> micro-batch; ``update.py`` runs a single micro-batch.

In reading order: :class:`FitParts`, the parts of a fit; :meth:`TrainingLoop.run` with the beginning and the end of an epoch;
``_run_epoch``, which is the hot path; then validation.  What else happens after some micro-batches, and what ends training, are
entries of the agenda (``entries.py``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from fabricamp.agenda import PassEnd
from fabricamp.data import set_epoch
from fabricamp.engine.entries import Deadline, Flush, Interruption, Stop, Validation
from fabricamp.engine.optimizer_setup import sharing_weights
from fabricamp.engine.report.time_spent import SlowData
from fabricamp.engine.run_parts import RunParts
from fabricamp.errors import ConfigError
from fabricamp.habits import say_difference
from fabricamp.hooks import call_all, call_hook
from fabricamp.optimizers import modes, muon
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn
    from torch.autograd.graph import GradientEdge

    from fabricamp._utils.types import Batch, Loader, Step
    from fabricamp.data import Feed
    from fabricamp.engine.checks.monitors import MonitorLook
    from fabricamp.engine.checks.optimizer_states import StateLook
    from fabricamp.engine.update import StepRunner, Update
    from fabricamp.hooks import Calls
    from fabricamp.watchdog import LoopRequests

_LOG = logging.getLogger("fabricamp")


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class FitParts(RunParts):
    """The parts of a fit: those of its run, and what is there once its loaders and its step are."""

    requests: LoopRequests
    feed: Feed
    loader: Loader
    step: Step
    length: float
    """The number of micro-batches of an epoch; inf if unknown."""
    validate: Callable[[], bool] | None
    together: Callable[[Iterable[Batch]], Iterator[Batch]]
    """Makes the ranks begin a pass over their batches together."""
    meet_at_end_of_data: Callable[[int], None]
    say: Callable[[str], None] | None
    """Logs a line; None where the run is silent."""
    monitors: MonitorLook | None
    """Looks whether the monitored names are logged; None on ranks that say nothing."""
    states: StateLook | None
    """Looks at the states of optimizers of others after the first steps; None if no callback saves them."""
    renew: Callable[[FitParts], None]
    """Called before each epoch: replaces the loaders if the epoch reloads them."""


class TrainingLoop:
    """Runs epochs until a limit or a stop, with validation and flushes in between; looks up hooks before the first batch.

    ``runner`` runs the batches: ``update`` itself, or CUDA graphs beside it.
    """

    def __init__(self, parts: FitParts, update: Update, runner: StepRunner) -> None:
        self.parts = parts
        self.update = update
        self.runner = runner
        self.state = parts.state
        self.metrics = parts.metrics
        self._step = parts.step
        self._batch_start = parts.hooks("on_train_batch_start")
        self._batch_end = parts.hooks("on_train_batch_end")
        self._settings = parts.settings
        self._flush = Flush(parts, update)
        self._deadline = Deadline(parts, update)
        self._validation = Validation(parts, lambda: self._validate())  # noqa: PLW0108 - a profiler replaces the method
        self._stop = Stop(parts, update, self._end_as_in_lightning)
        self._interruption = Interruption(parts)
        self._agenda = parts.state.agenda
        self._agenda.add(self._flush)
        if self._settings.max_time is not None:
            self._agenda.add(self._deadline)
        if parts.states is not None:
            self._agenda.add(parts.states)
        self._agenda.add(self._validation)
        if parts.monitors is not None:
            self._agenda.add(parts.monitors)
        self._agenda.add(self._stop, self._interruption)
        if parts.say is not None:
            self._agenda.add(SlowData(parts, parts.say))
        self._agenda.begin(parts.state, update.batches_to)
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
        state.user_call.scope = Scope.TRAIN_EPOCH
        # Resumed within an epoch: the checkpoint has what on_train_start and on_train_epoch_start log; they must not log it twice.
        self.metrics.muted = resume_point.resumed and state.batch_idx > 0
        modes.train(self.parts.optimizers, self.parts.precision)
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
        while self._epochs_remain() and not self._interruption.is_here():
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
        state.user_call.scope = Scope.NOWHERE
        if not state.interrupted:  # else the resumed run delivers the pending values, at the same steps
            self._finish_last_steps()

    def end(self) -> None:
        """Runs ``on_train_end``, unless there was nothing to train; not called for an interrupted run."""
        if not self._idle:
            call_all(self.parts.hooks("on_train_end"))

    def _epochs_remain(self) -> bool:
        """Whether there is an epoch to run, or to finish: a resumed run may have been cut after an epoch's last step."""
        state = self.state
        if not self._stop.is_done(in_epoch=False):
            return True
        max_epochs = self._settings.max_epochs
        within_epoch = state.batch_idx > 0 and (max_epochs < 0 or state.epoch < max_epochs)
        end_hooks_have_run = state.closed_at == state.batches_done
        return within_epoch and not end_hooks_have_run

    # -- an epoch ----------------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, hooks: Calls) -> None:
        """Prepares an epoch and runs its start hooks: before its first batch, or before the next batch of a resumed epoch."""
        state = self.state
        state.user_call.scope = Scope.TRAIN_EPOCH
        self.parts.resume_point.begin_epoch()
        self.parts.renew(self.parts)
        self._validation.read_settings()
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
        for optimizer in self.parts.optimizers:
            muon.check_shapes(optimizer)

    def _follow_freezing(self) -> None:
        """Lets the strategy rewrap the step if hooks have frozen or unfrozen parameters."""
        with sharing_weights(self.parts.precision, self.parts.optimizers):
            step = self.parts.strategy.rewrap_module(self._step)
        if step is not self._step:
            self._step = step
            self.runner.use(step)
        self._accumulate_grad_nodes = accumulate_grad_nodes(self.parts.module)

    def _catch_up(self) -> bool | None:
        """Does the work left when the run was cut; returns None if batches follow, else whether all of the epoch's are done."""
        state = self.state
        feed = self.parts.feed
        self._restore_rng()
        if state.batch_idx == 0:
            return None
        at_end = feed.last or state.batch_idx >= feed.limit
        validated = state.validated_at == state.batches_done
        if not validated and self._validation.act(last=at_end) is not None:
            return False
        return at_end if self._stop.is_done(in_epoch=True) else None

    def _restore_rng(self) -> None:
        """In a resumed run, once: restores RNG states, and does the work of a step after which the run was cut before the work."""
        self.metrics.muted = False
        if self.parts.resume_point.restore_rng_once():
            self._flush.work()
            self._deadline.work()

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether the epoch is complete: no batch of it is left.

        The pass ends after the loader's last batch, before a batch that a hook skips with the others, or where an entry of the
        agenda says so.  docs/architecture.md ("The loop") shows it shortened.
        """
        state = self.state
        user_call = state.user_call
        agenda = self._agenda
        feed = self.parts.feed
        update = self.update
        runner = self.runner
        user_call.scope = Scope.TRAIN_STEP
        first = state.batch_idx
        steps_before = state.global_step
        runner.begin_epoch(first)
        agenda.renew()
        batches: Iterable[Batch] = feed.starting_at(first)
        if self.parts.say is not None:
            batches = self.parts.time_spent.reading(batches)  # without the wait for the first batches of other ranks
        state.batches = enumerate(runner.read(self.parts.together(batches)), first)
        # A resumed epoch may have been saved after its last batch: then no batch is left, and the epoch only has to be finished.
        last = first > 0
        skipped = False
        end = None
        for batch_idx, batch in state.batches:
            user_call.batch = batch
            last = feed.last
            if self._batch_start and self._skips(batch, batch_idx):
                skipped = True
                break
            outputs = runner.run_batch(batch, batch_idx, last)
            if last:
                self._end_data(batch_idx + 1)
            # Counted before the hooks: a run resumed from a checkpoint that a hook writes continues after this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in self._batch_end:
                hook(outputs, batch, batch_idx)
            if last or state.batches_done >= agenda.next:
                end = agenda.run(last)
                if end is not None:
                    break
            elif update.stepped:
                agenda.passed = state.batches_done  # as Stop does where it acts: this rank did not stop after this step
            update.stepped = False
        # Complete without the batches that a hook skipped; not while a validation is left, with which a resumed run begins.
        complete = (last or skipped) and end is not PassEnd.CUT_SHORT
        # No warning for a resumed epoch: its steps may have been made before the cut.
        self._check_epoch(steps_before, ended=complete and first == 0)
        user_call.batch = None
        state.batches = None
        return complete

    def _skips(self, batch: Batch, batch_idx: int) -> bool:
        """Runs every ``on_train_batch_start``; returns whether one of them returned -1, which skips the rest of the epoch."""
        skips = False
        for hook in self._batch_start:
            skips = hook(batch, batch_idx) == -1 or skips
        if skips and self.state.batches_done < self._agenda.committed:
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
        if state.user_call.batch is None and not state.batch_idx:
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
        state.user_call.scope = Scope.TRAIN_EPOCH
        self.metrics.reduce_train_epoch(state.global_step)
        call_all(hooks)
        self.metrics.end_train_epoch(state.global_step)
        # Another library's file of an epoch whose batches are all done has none of its values: nothing can be decided by them.
        decides = state.batches_done != self.parts.resume_point.lost_values
        if complete and decides:
            self.update.schedules.end_epoch_monitored(state.epoch)
        state.epoch_ended = complete
        state.closed_at = state.batches_done
        state.user_call.scope = Scope.NOWHERE  # values logged from here on would belong to no epoch
        if decides:
            call_all(monitors)
        if complete:
            state.epoch += 1
            state.batches_of_last_epoch = state.batch_idx
            state.batch_idx = 0
        state.epoch_ended = False

    # -- validation --------------------------------------------------------------------------------------------------------------

    def validation_follows(self) -> bool:
        """Whether a validation follows the present micro-batch (for its end hooks); leaves out validations that are due by time."""
        return self._validation.follows()

    def _validate(self) -> bool:
        """Runs validation; returns whether a stop cut it short."""
        validate = cast("Callable[[], bool]", self.parts.validate)
        if (
            self.update.accumulation_state() is None
        ):  # else the gradients of an accumulation in progress are still needed
            call_hook(self.parts.module, "on_validation_model_zero_grad")
        elif not self.parts.module.automatic_optimization:
            say_difference("gradients accumulated by hand stay at a validation; Lightning drops them")
        # Validation callbacks see what the last step logged; this waits for that step, once per validation.
        self.metrics.drain()
        self.metrics.reduce_steps(self.state.global_step)
        self.state.user_call.batch = None
        modes.evaluate(self.parts.optimizers, self.parts.precision)
        with self.parts.time_spent.part("validation"):
            cut_short = validate()
        modes.train(self.parts.optimizers, self.parts.precision)
        if not cut_short:
            self.state.validated_at = self.state.batches_done
        self.state.user_call.scope = Scope.TRAIN_STEP
        return cut_short

    def _end_as_in_lightning(self) -> None:
        """Logs the last step's values and validates, if ``should_stop`` ends training within an epoch."""
        state = self.state
        every = self._settings.log_every_n_steps
        if every and state.global_step % every:  # else they are logged already
            self.metrics.flush(state.global_step)
        every_epochs = self._settings.check_val_every_n_epoch or 1
        is_validated = state.validated_at == state.batches_done
        if self.parts.validate is not None and not is_validated and (state.epoch + 1) % every_epochs == 0:
            self._validate()

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def _finish_last_steps(self) -> None:
        """Waits for the step statuses and logged values of the last steps, and acts on them."""
        if not self.state.should_stop:  # a limit ended the run, which the other ranks have reached too
            self.parts.strategy.membership.end_steps()
        if self.update.overflow_policy is not None:
            self.update.overflow_policy.finish()
        self.metrics.drain()


def accumulate_grad_nodes(module: nn.Module) -> list[GradientEdge]:
    """Returns the AccumulateGrad nodes of the module's parameters, the leaves of autograd's graph: who keeps them keeps them alive.

    A parameter has only a weak pointer to its node (grad_accumulator_), so each step would create the nodes again, holding the GIL.
    Other types of parameters (quantised, sharded) may have no view through which to find the node.
    """
    return [
        get_gradient_edge(parameter)
        for parameter in module.parameters()
        if type(parameter) is Parameter and parameter.requires_grad
    ]
