"""Automatic optimization with gradient accumulation: forward and backward of a micro-batch, and the update after the last one.

The parts, in their order: :class:`StepRunner`, what the loop asks to run its batches; :class:`Update`; :class:`ResolvedHooks`, what
an update calls of hooks, module and precision, looked up before the first batch; :class:`LossWeights`, for losses given as (sum,
weight); :class:`AccumulationTensors`, the state of an accumulation in progress; a pass over the training data without updates.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import Tensor

from fabricamp._utils.reach import reaches
from fabricamp.checkpoint.identities import has_own_order
from fabricamp.data import set_epoch
from fabricamp.engine.overflow_policy import OverflowPolicy
from fabricamp.engine.schedules import Schedules
from fabricamp.errors import ConfigError, OptimizationError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.gradients.memory import GradientMemory
from fabricamp.habits import habits
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.closures import takes_closure
from fabricamp.precision.base import Precision
from fabricamp.precision.level import OptLevel
from fabricamp.precision.loss_scaler import pending_in
from fabricamp.precision.step_results import LossWatch
from fabricamp.precision.torch_updates import StepClosure, clip_gradients, write_gradients
from fabricamp.precision.unseen_edits import WHOLE_LOOKS
from fabricamp.state import Scope
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyOutput, Batch, Output, StateDict, Step
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.session import Session
    from fabricamp.gradients.flat import Gradients
    from fabricamp.precision.base import Clip
    from fabricamp.precision.optimizer_step import OptimizerStep

_OF_GRADIENTS: Final = frozenset({"grad", "grad_norm", "get_total_norm", "clip_grad_norm_"})
"""Names of which a hook's code has one if it looks at gradients."""


class StepRunner(Protocol):
    """What the loop asks to run the batches of an epoch: an :class:`Update`, or CUDA graphs beside one.

    The state of a fit's steps (schedules, counters, the accumulation in progress) is the ``Update``'s alone.
    """

    def use(self, step: Callable[..., object], /) -> None:
        """Sets the step to run: ``training_step``, as wrapped by the strategy."""
        ...

    def begin_epoch(self, batch_idx: int, /) -> None:
        """Prepares for an epoch whose next batch is ``batch_idx``: 0, or more in a resumed epoch."""
        ...

    def read(self, batches: Iterator[Batch], /) -> Iterator[Batch]:
        """Returns an epoch's batches for the loop."""
        ...

    def run_batch(self, batch: Batch, batch_idx: int, last: bool, /) -> Output:
        """Runs a micro-batch (``last``: the last one of its epoch); returns the outputs for the hooks after it."""
        ...


class Update:
    """Runs micro-batches and makes one update per accumulation, by the optimizer's step.

    Everything that can be looked up is looked up before the first batch.

    ``stepped`` is True from an update until the loop has noted it.  ``loss`` is the loss of the last micro-batch in the
    accumulation in progress, of ``accumulate`` micro-batches; ``sums``: its gradients are summed in the precision's own memory.
    ``weights`` is set once a loss came with a weight; ``reference`` is their saved reference weight, in a resumed run.

    ``one_backward`` says why a closure cannot run forward and backward again within a step, and what to change, if CUDA graphs run
    the steps.
    """

    def __init__(self, parts: FitParts, *, one_backward: str = "") -> None:
        automatic = parts.module.automatic_optimization
        precision = parts.precision
        settings = parts.settings
        self.stepped = False
        self.empty_steps = 0
        """Steps since the epoch began or was resumed in which no micro-batch had a loss: they are counted, but update nothing."""
        self.loss: Tensor | None = None
        self.schedules = Schedules(parts.schedulers if automatic else [], parts.module, parts.metrics, parts.state)
        self._parts = parts
        self._state = parts.state
        self.accumulate = settings.accumulate_grad_batches
        self.divisor: float = self.accumulate
        """What a loss is divided by before backward; with the part of a micro-batch, more than ``accumulate``."""
        self._steps_at_epoch_end = settings.partial_window == "step"
        # Hooks after a batch then get the loss as a share of the accumulation's, and {} for None.
        self._shows_shares = habits().outputs_are_shares
        self._last_call_counts = habits().last_closure_call_counts
        self._drops_at_epoch_end = settings.partial_window == "drop"
        self._offset = 1  # an accumulation ends where (batch_idx + _offset) % accumulate == 0
        self._batch_complete = True  # False from a micro-batch's backward to its end
        self._first_looks = WHOLE_LOOKS
        self._next_look: float = 0
        self._optimizer = parts.optimizers[0] if parts.optimizers and automatic else None
        self.optimizer_step: OptimizerStep | None = parts.optimizer_steps[0] if self._optimizer is not None else None
        """The optimizer's step; None in manual optimization and without an optimizer."""
        # Whether gradients are summed in the precision's own memory; .grad then holds those of one micro-batch.
        self.sums = self.optimizer_step is not None and self.optimizer_step.sums
        self.weights: LossWeights | None = None
        self.reference: Tensor | None = None
        self.overflow_policy: OverflowPolicy | None = None
        step_results = precision.verdicts
        parts.metrics.watch = LossWatch(checked=step_results is not None)
        if step_results is not None:
            self.overflow_policy = OverflowPolicy(
                step_results, self.schedules, parts.state, parts.strategy, losses=automatic
            )
        # If steps may be skipped, the overflow policy advances the schedules instead, by the applied steps.
        schedules_wait = step_results is not None and step_results.schedules_follow
        self._advances_at_once = self.schedules.follow_steps and not schedules_wait
        # _compare_kinds, which runs once, replaces it by an object without itself.
        self._hooks = resolve_hooks(parts, self._optimizer)
        # Hooks that run before the next zero_grad may look at the gradients that an update has used.  An overridden
        # optimizer_zero_grad may keep them, to add to them: they keep their scale.
        looks_after = parts.hooks.reach(_OF_GRADIENTS, "on_train_batch_end", "on_before_zero_grad")
        for optimizer in parts.optimizers:
            if isinstance(optimizer, FusedOptimizer):
                optimizer.leaves_gradients = looks_after and self._hooks.zero_grad is None
        self._closure: StepClosure | None = None
        """What the optimizer's step, or the module's ``optimizer_step``, can call; None: the optimizer needs none."""
        self._batch: tuple[Batch, int] | None = None  # of the step, while the closure may run it again
        self._outputs_again: Output = None
        if self._optimizer is not None and (takes_closure(self._optimizer) or self._hooks.step is not None):
            obstacle = one_backward or self._obstacle_to_second_pass()
            self._closure = StepClosure(self._optimizer, self._run_again, obstacle)
            cast("OptimizerStep", self.optimizer_step).call = self._closure.step
        # With several ranks, a weight on some ranks only would leave the others waiting in its exchange: before the first backward
        # the ranks compare whether their losses have weights.  False once they have found that no loss has one.
        self._compares_kinds = automatic and parts.strategy.world_size > 1
        if self._compares_kinds:
            # As a hook, the comparison costs nothing after it has run.
            before_backward = [self._compare_kinds, *self._hooks.before_backward]
            self._hooks = replace(self._hooks, before_backward=before_backward)
        self.use(parts.step)

    def use(self, step: Callable[..., object]) -> None:
        """Sets the step to run: ``training_step``, as wrapped by the strategy."""
        precision = self._parts.precision
        step = with_index(step, self._parts.module.training_step)
        # A precision that does not override forward is left out: one Python frame less in each step.
        self._forward = partial(precision.forward, step) if overrides(precision, "forward", Precision) else step
        if self.weights is not None:
            self._forward = self.weights.requiring_weights(self._forward)

    # -- an epoch ----------------------------------------------------------------------------------------------------------------

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares for an epoch whose next batch is ``batch_idx``: 0, or more in a resumed epoch."""
        settings = self._parts.settings
        self.empty_steps = 0
        if settings.accumulation_schedule is not None:
            self.accumulate = settings.accumulate_grad_batches
            self.divisor = self.accumulate
            if self.weights is not None:
                self.weights.accumulate = self.accumulate
        # An accumulation need not begin at a multiple of accumulate: it may be carried over from the last epoch, or a resumed run
        # may start between two multiples, as the number of ranks or the batch size changed.
        self._offset = 1 + (self._state.open_batches - batch_idx) % self.accumulate

    def batches_to(self, steps: float) -> float:
        """Returns the number of micro-batches to the end of ``steps`` more steps, if the epoch does not end before."""
        before_last = -(self._state.batch_idx + self._offset) % self.accumulate
        return before_last + 1 + (steps - 1) * self.accumulate

    def read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns an epoch's batches for the loop; an elastic strategy (``heals``) begins each step before its batch is read."""
        return self._beginning_steps(batches) if self._parts.strategy.membership.heals else batches

    def _beginning_steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Lets the strategy begin each step before its first batch is read, when the run's state is as in a checkpoint."""
        membership = self._parts.strategy.membership
        end = object()
        while True:
            if self._state.open_batches == 0 and not self._parts.feed.last:
                membership.begin_step()
            batch = next(batches, end)
            if batch is end:
                return
            yield batch
            del batch

    def end_epoch(self) -> None:
        """Drops an accumulation in progress under ``partial_window="drop"``, and steps schedulers; after the epoch's last batch."""
        if self._drops_at_epoch_end:
            self.drop_accumulation()
        self.schedules.end_epoch(self._state.epoch)

    # -- a micro-batch -----------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs a micro-batch (``last``: the last one of its epoch); returns the outputs for the hooks after it."""
        ends = self.ends_accumulation(batch_idx, last)
        if ends and not self.sums:
            outputs, loss = self.forward_backward(batch, batch_idx, self.loss)
        else:
            # The wrapper exchanges no gradients: more micro-batches follow, or the update exchanges the sums.
            with self._parts.strategy.no_sync():
                outputs, loss = self.forward_backward(batch, batch_idx, self.loss)
        return self.end_batch(batch, batch_idx, outputs, loss, ends=ends)

    def ends_accumulation(self, batch_idx: int, last: bool) -> bool:
        """Whether an update follows the micro-batch ``batch_idx``."""
        return (batch_idx + self._offset) % self.accumulate == 0 or (last and self._steps_at_epoch_end)

    def end_batch(self, batch: Batch, batch_idx: int, outputs: Output, loss: Tensor | None, *, ends: bool) -> Output:
        """Does what follows forward and backward of a micro-batch: the update, if it ``ends`` an accumulation with a ``loss``.

        Returns the outputs for the hooks after it.
        """
        if not ends:
            self.note_open_batch(loss)
            return outputs
        if loss is None:
            self._note_empty_step()
        else:
            self.check_optimizer()
            if self._state.global_step >= self._next_look:
                self.take_edits()
            self.loss = None
            if self._closure is None:
                self.launch_update(loss, batch_idx)
            else:
                outputs = self._launch_with_closure(self._closure, loss, batch, batch_idx, outputs)
            self._count_update()
        # Last: what is saved when a schedule or an overflow raises repeats the whole accumulation.
        self._state.open_batches = 0
        return outputs

    def forward_backward(self, batch: Batch, batch_idx: int, earlier: Tensor | None) -> tuple[Output, Tensor | None]:
        """Runs forward and backward of a micro-batch, in an accumulation whose last loss so far is ``earlier``.

        Without an earlier loss it begins an accumulation: it clears the gradients of the last one.  Returns the outputs for hooks,
        and the accumulation's last loss now: ``earlier`` for a micro-batch without a loss.
        """
        hooks = self._hooks
        if earlier is None and hooks.zero_grad_first is not None:
            # So that activations take the memory of the last step's gradients.
            hooks.zero_grad_first()
        output = self._forward(batch, batch_idx)
        loss = output if isinstance(output, Tensor) else self._loss_of(output)
        if loss is None:
            return {} if self._shows_shares else None, earlier
        if not loss.requires_grad or loss.numel() != 1:
            self._refuse_loss(loss)
        if earlier is None and hooks.zero_grad_first is None:
            # With the first loss of an accumulation: a micro-batch without one leaves the gradients of the last.
            self._clear_gradients(batch_idx)
        share = loss
        if self.divisor != 1:
            share = loss / self.divisor
            self._batch_complete = False
        for hook in hooks.before_backward:
            hook(share)
        hooks.backward(share)
        for hook in hooks.after_backward:
            hook()
        if self.sums and self.optimizer_step is not None:
            self.optimizer_step.memory().add()
        if not hooks.wants_outputs:
            return None, loss
        if self._shows_shares:
            return {**self._detached(output), "loss": share.detach()}, loss
        return {"loss": output.detach()} if isinstance(output, Tensor) else self._detached(output), loss

    def _loss_of(self, output: Output) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            return loss
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor):
            if self._compares_kinds and self.weights is None:
                compare_kinds(self._parts.strategy, weighted=True)
            return self._use_weights().take(*loss)
        if output is None and not self._parts.strategy.lockstep:
            return None
        if output is None:
            raise OptimizationError(
                f"training_step returned None on rank {self._parts.strategy.rank}: with several processes every rank has to "
                "return a loss, or the others wait for its gradients; return `0.0 * loss` instead"
            )
        returned = f"a dict with keys {sorted(output)}" if isinstance(output, dict) else type(output).__name__
        raise ConfigError(
            f"training_step returned {returned}; return the loss as a tensor or as (sum, weight), or a dict with it under 'loss'"
        )

    def _use_weights(self) -> LossWeights:
        """Returns the loss weights; from the first call on, the gradients of each accumulation are divided by its weight."""
        if self.weights is None:
            if self.loss is not None or (self._parts.strategy.world_size > 1 and not self._compares_kinds):
                raise mixed()
            self.weights = LossWeights(self._parts.strategy, self.accumulate, self.reference)
            self._forward = self.weights.requiring_weights(self._forward)
            if self.optimizer_step is not None:
                # The step now divides by the weight, which comes with the exchanged gradients.
                self.optimizer_step.exchanges = True
                self.optimizer_step.reduce = self.weights.dividing(self.optimizer_step.reduce)
        return self.weights

    def _compare_kinds(self, _: Tensor) -> None:
        """Checks that losses have weights on all ranks or on none; runs once, as a hook before the first backward."""
        self._hooks = replace(self._hooks, before_backward=self._hooks.before_backward[1:])
        if self.weights is None:  # else _loss_of has compared
            self._compares_kinds = False
            compare_kinds(self._parts.strategy, weighted=False)

    @staticmethod
    def _refuse_loss(loss: Tensor) -> None:
        if loss.numel() != 1:
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; training_step has to return a scalar, such as loss.mean()"
            )
        raise ConfigError(
            "the loss has no graph: nothing that it was computed from requires gradients; check for detach(), torch.no_grad() or "
            "item() in training_step and for frozen parameters, or set automatic_optimization=False"
        )

    def _clear_gradients(self, batch_idx: int) -> None:
        """Clears the last accumulation's gradients, with the hooks around it."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for hook in self._hooks.before_zero_grad:
            hook(optimizer)
        if self._hooks.zero_grad is not None:
            self._hooks.zero_grad(self._state.epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _detached(self, output: Output) -> AnyOutput:
        """Returns what hooks get, detached from the graph: a loss becomes a dict."""
        if self.weights is not None:
            return self.weights.outputs(output)
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        if isinstance(output, dict):
            return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        return output

    # -- the update --------------------------------------------------------------------------------------------------------------

    def launch_update(self, loss: Tensor | None, batch_idx: int = 0) -> None:
        """Launches an update's work on the device: exchange, step, end of the accumulation step."""
        step = self.optimizer_step
        if step is None:
            if self.overflow_policy is not None:
                self.overflow_policy.launch_end(loss)
            return
        if self._closure is not None:
            self._closure.loss = loss
        if self._hooks.shows_gradients:
            self._launch_shown_update(step, loss, batch_idx)
        else:
            step.run(loss)
        step.after()

    def prepare_update(self, loss: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Launches an update up to the optimizer's own step; returns each updated parameter with the ``.grad`` for it."""
        return cast("OptimizerStep", self.optimizer_step).prepare(loss)

    def finish_update(self, loss: Tensor | None) -> None:
        """Steps the optimizer with the gradients of :meth:`prepare_update`, which are in ``.grad``."""
        if self._closure is not None:
            self._closure.loss = loss
        cast("OptimizerStep", self.optimizer_step).finish_prepared()

    def summing_memory(self) -> GradientMemory | None:
        """Returns the memory in which the gradients of an accumulation are summed; None if they are summed in ``.grad``."""
        return self.optimizer_step.memory() if self.sums and self.optimizer_step is not None else None

    # -- closures ----------------------------------------------------------------------------------------------------------------

    def _launch_with_closure(
        self, closure: StepClosure, loss: Tensor, batch: Batch, batch_idx: int, outputs: Output
    ) -> Output:
        """Launches an update whose optimizer may run ``batch`` again; returns the outputs for the hooks after it."""
        self._batch = batch, batch_idx
        self._outputs_again = None
        try:
            self.launch_update(loss, batch_idx)
        finally:
            self._batch = None
            self._parts.metrics.muted = False
        return self._outputs_again if self._last_call_counts and self._outputs_again is not None else outputs

    def _obstacle_to_second_pass(self) -> str:
        """Returns why a closure cannot run forward and backward again within a step, and what to change; empty if it can."""
        parts = self._parts
        precision = parts.precision
        name = precision.name
        if isinstance(precision, OptLevel) and (precision.level.loss_scale != 1.0 or precision.level.master_weights):
            return f"precision {name!r} does not offer: its loss scale and fp32 masters belong to one backward; use 'O0' or 'O4'"
        if precision.verdicts is not None:
            return (
                f"nan_policy={parts.settings.nan_policy!r} does not offer: it checks one backward; leave nan_policy out"
            )
        if not all(step.splits for step in parts.optimizer_steps):
            return f"a precision with a step of its own ({type(precision).__name__}) does not offer; use 'O0' or 'O4'"
        if parts.settings.accumulates:
            return (
                "accumulate_grad_batches > 1 does not offer: the step has several batches; give 1, and larger batches"
            )
        strategy = parts.strategy
        if strategy.sharding.shards or strategy.membership.heals:
            return f"strategy={strategy.name!r} does not offer; use 'ddp'"
        return ""

    def _run_again(self) -> Tensor:
        """Runs forward and backward of the step's batch once more, for a closure; returns the loss."""
        name = type(self._optimizer).__name__
        if self._batch is None:
            raise ConfigError(f"the closure of {name}.step was called after the step; call it within the step")
        if self.weights is not None:
            raise ConfigError(
                f"training_step returned (sum, weight), but {name} runs backward again within its step; return the mean"
            )
        self._parts.metrics.muted = not self._last_call_counts
        self._outputs_again, loss = self._pass_for_closure(*self._batch)
        return loss

    @torch.enable_grad()  # an optimizer may call its closure within no_grad
    def _pass_for_closure(self, batch: Batch, batch_idx: int) -> tuple[Output, Tensor]:
        """Runs forward, backward, exchange and clipping for a closure; returns the outputs for hooks, and the loss.

        ``self.log`` counts only the first forward of a step.  With ``last_closure_call_counts`` it counts all of them: a step's
        value is that of the last one.
        """
        optimizer = cast("Optimizer", self._optimizer)
        step = cast("OptimizerStep", self.optimizer_step)
        torch.clear_autocast_cache()  # within a step it would keep half copies of the weights from before
        outputs, loss = self.forward_backward(batch, batch_idx, None)
        if loss is None:
            name = type(optimizer).__name__
            raise ConfigError(f"training_step returned None, but {name} needs the loss of every forward; return it")
        gradients = step.exchange()
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)
        self._parts.metrics.muted = not self._last_call_counts
        for hook in self._hooks.before_step:
            hook(optimizer)
        if self._hooks.clipping is not None:
            self._hooks.clipping(optimizer, step.clip)
        elif step.clip is not None:
            clip_gradients(optimizer, step.clip)
        return outputs, loss

    def check_optimizer(self) -> None:
        """Raises if a hook has put another optimizer into ``trainer.optimizers``: it has no masters and no step."""
        optimizers = self._parts.optimizers
        if self._optimizer is None or (optimizers and optimizers[0] is self._optimizer):
            return
        there = f"replaced by another {type(optimizers[0]).__name__}" if optimizers else "taken away"
        raise ConfigError(
            f"trainer.optimizers[0] was {there} in the middle of a fit; change the one from configure_optimizers (its "
            "param_groups, add_param_group, load_state_dict), or end the fit and begin another"
        )

    def take_edits(self) -> None:
        """Lets masters take edits of their weights, and refuses those that they would not see, if a look for these is due.

        A replay calls this each time, an eager update, which takes edits itself, for a look.
        """
        is_due = self._state.global_step >= self._next_look
        if is_due:
            self._note_look()
        self._parts.precision.take_edits(look=is_due)

    def _note_look(self) -> None:
        """Sets the step before which half weights are compared with their masters the next time."""
        step = self._state.global_step
        every = self._parts.settings.log_every_n_steps
        self._first_looks -= 1
        if self._first_looks > 0:
            self._next_look = step + 1
        else:
            # Midway between two flushes the host is ahead of the device, which does not wait for it then.
            self._next_look = ((step - every // 2) // every + 1) * every + every // 2 if every else math.inf

    def _launch_shown_update(self, step: OptimizerStep, loss: Tensor | None, batch_idx: int) -> None:
        """Launches an update before which hooks or overridden methods see the gradients: unscaled, in ``.grad``."""
        optimizer = step.optimizer
        hooks = self._hooks
        run: Callable[[], object] | None = None

        def look() -> Clip | None:
            for hook in hooks.before_step:
                hook(optimizer)
            if hooks.clipping is None:
                return step.clip
            hooks.clipping(optimizer, step.clip)
            return None

        if self._closure is not None and hooks.step is not None:
            users = partial(hooks.step, self._state.epoch, batch_idx, optimizer, self._closure)
            run = partial(self._closure.during, users)
        step.run_shown(loss, look, run)

    def note_update(self) -> None:
        """Does the host's work after an update that the replay of a graph has launched, and ends its accumulation."""
        self.loss = None
        self._state.open_batches = 0
        self._count_update()

    def _count_update(self) -> None:
        """Does the host's work after any update: counters, schedules, step statuses of earlier updates."""
        self._state.global_step += 1
        self.stepped = True
        if self._advances_at_once:
            self.schedules.advance(self._state.global_step)
        if self.overflow_policy is not None:
            self.overflow_policy.note_end()

    def _note_empty_step(self) -> None:
        """Counts a step of which no micro-batch had a loss, as Lightning does: max_steps ends a run of such steps too.

        Schedules that follow the applied steps of a loss scaler do not move, since the device has made no step.
        """
        self._state.global_step += 1
        self.stepped = True
        self.empty_steps += 1
        note_empty_step = getattr(self._parts.precision.verdicts, "note_empty_step", None)
        if note_empty_step is not None:
            note_empty_step()
        if self._advances_at_once:
            if self._optimizer is not None:
                # Else a schedule would warn that it steps before its optimizer, which has nothing to do in this step.
                optimizer: Any = self._optimizer
                optimizer._opt_called = True
            self.schedules.advance(self._state.global_step)

    # -- the accumulation in progress --------------------------------------------------------------------------------------------

    def note_open_batch(self, loss: Tensor | None) -> None:
        """Does the host's work after a micro-batch that does not end its accumulation, whose last loss is ``loss``."""
        self.loss = loss
        self._state.open_batches += 1
        self._batch_complete = True

    def drop_accumulation(self) -> None:
        """Drops the accumulation in progress."""
        self.loss = None
        self._state.open_batches = 0
        self._parts.strategy.note_window(begun=False)
        if self.weights is not None:
            self.weights.forget()

    def accumulation_state(self) -> StateDict | None:
        """Returns the state of the accumulation in progress beside ``.grad``; None if there is none, or within a micro-batch."""
        # Without a complete micro-batch the gradients are those of the one in work, which a resumed run repeats.
        if self.loss is None or not self._batch_complete or self._state.open_batches == 0:
            return None
        return self._accumulation_tensors().state(self.loss.detach())

    def load_accumulation_state(self, state: StateDict) -> str:
        """Restores the result of :meth:`accumulation_state`; returns why that is impossible, or an empty string."""
        if state.get("weighted"):
            self._use_weights()
        problem = self._accumulation_tensors().load(state)
        if not problem:
            self.loss = state["tensors"][-1].to(self._parts.strategy.device)
        return problem

    def note_restored_gradients(self, state: StateDict) -> None:
        """Called after :meth:`load_accumulation_state` of ``state``, once its gradients are back in ``.grad``."""

    def changed_order(self, checkpoint: StateDict) -> str:
        """Returns why the sums of gradients in ``checkpoint`` are not those of the parameters here, or an empty string."""
        parts = self._parts
        if self._accumulation_tensors().has_sums and not has_own_order(checkpoint, parts.optimizers, parts.module):
            return "the parameters of an optimizer have another order"
        return ""

    def take_over_schedules(self, amp: StateDict) -> None:
        """Lets schedules by steps go on from a checkpoint whose precision had the state ``amp``, and maybe another level.

        Where schedules learn two steps later whether a step was applied, they are owed these two; elsewhere they move at once.
        """
        scaler = amp.get("scaler")
        if not isinstance(scaler, dict) or not self.schedules.follow_steps:
            return
        results = self._parts.precision.verdicts
        follows = results is not None and results.schedules_follow and results.inherited_pending > 0
        # An earlier version's file does not say whether its schedules waited.
        waited_once = amp.get("loss_scale") == "dynamic" and not habits().schedules_move_with_each_step
        waited = amp.get("schedules_follow", waited_once or follows)
        if waited and not follows:
            for applied_steps in pending_in(scaler):
                if applied_steps is not None:
                    self.schedules.catch_up(applied_steps)
        if self.overflow_policy is not None:
            self.overflow_policy.inherited_are_counted = follows and not waited

    def _accumulation_tensors(self) -> AccumulationTensors:
        return AccumulationTensors(self._parts.precision, self._parts.optimizers, self.accumulate, self.weights)


def with_index(step: Callable[..., object], training_step: Callable[..., object]) -> Step:
    """Returns ``step`` as a callable of (batch, batch_idx), also if ``training_step`` takes only the batch."""
    signature = inspect.signature(training_step)
    for arguments in ((None, 0), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return step if len(arguments) == 2 else lambda batch, _: step(batch)
    raise ConfigError(f"training_step takes {signature}; it gets (batch) or (batch, batch_idx)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedHooks:
    """Hooks that are overridden anywhere, and methods that the module overrides (None: it does not).

    A hook that nobody overrides costs nothing in a step.
    """

    before_zero_grad: Sequence[Callable[..., object]]
    before_backward: Sequence[Callable[..., object]]
    after_backward: Sequence[Callable[..., object]]
    before_step: Sequence[Callable[..., object]]
    zero_grad: Callable[..., object] | None
    clipping: Callable[[Optimizer, Clip | None], None] | None
    step: Callable[..., object] | None
    run_backward: Callable[..., object]
    backward: Callable[..., object]
    """Called with the loss: ``run_backward``, through ``precision.backward`` if the precision overrides it."""
    wants_outputs: bool
    """Whether a hook after the batch gets the step's output."""
    shows_gradients: bool
    """Whether hooks or overridden methods see gradients before the update: only then a separate pass unscales them."""
    zero_grad_first: Callable[[], object] | None
    """The optimizer's ``zero_grad``, to be called before the forward; None: hooks around it, or code of ``training_step`` that
    looks at gradients, find those of the last step after the forward, as in Lightning."""


def resolve_hooks(parts: FitParts, optimizer: Optimizer | None) -> ResolvedHooks:
    """Looks up what an update of ``optimizer`` calls."""
    hooks = parts.hooks
    module = parts.module
    precision = parts.precision
    own = partial(overrides, module, base=TrainingModule)
    run_backward: Callable[..., object] = module.backward if own("backward") else Tensor.backward
    # Methods that only pass a call on are left out: a Python call costs as much as three hooks.
    scales = overrides(precision, "backward", Precision)
    before_zero_grad = hooks("on_before_zero_grad")
    before_step = hooks("on_before_optimizer_step")
    zero_grad = module.optimizer_zero_grad if own("optimizer_zero_grad") else None
    clipping = partial(_clip_by, module.configure_gradient_clipping) if own("configure_gradient_clipping") else None
    step = module.optimizer_step if own("optimizer_step") else None
    zero_grad_first: Callable[[], object] | None = None
    if optimizer is not None and not (before_zero_grad or zero_grad):
        # The class's own: a strategy may have wrapped the module's.
        looks_within = reaches(type(module).training_step, _OF_GRADIENTS, (module,))
        zero_grad_first = None if looks_within else optimizer.zero_grad
    return ResolvedHooks(
        before_zero_grad=before_zero_grad,
        before_backward=hooks("on_before_backward"),
        after_backward=hooks("on_after_backward"),
        before_step=before_step,
        zero_grad=zero_grad,
        clipping=clipping,
        step=step,
        run_backward=run_backward,
        backward=partial(precision.backward, run=run_backward) if scales else run_backward,
        wants_outputs=bool(hooks("on_train_batch_end")),
        shows_gradients=bool(before_step or clipping or step),
        zero_grad_first=zero_grad_first,
    )


def _clip_by(configure: Callable[..., object], optimizer: Optimizer, clip: Clip | None) -> None:
    """Calls the module's own method by Lightning's keywords."""
    configure(optimizer, gradient_clip_val=clip and clip.value, gradient_clip_algorithm=clip and clip.algorithm)


class LossWeights:
    """The weights of an accumulation's losses, on the device; the host reads none of them.

    Before backward a sum is divided by ``reference``, the last accumulation's mean weight: gradients then have the magnitude of
    those of a mean.  ``reference`` is a power of two, since dividing by it changes no digit.  The update divides by the remaining
    factor, together with the loss scale.
    """

    def __init__(self, strategy: Strategy, accumulate: int, reference: Tensor | None = None) -> None:
        if strategy.world_size > 1 and not strategy.averages_gradients:
            raise ConfigError(
                "training_step returned (sum, weight), which is divided by the weight on all ranks, but the strategy sums "
                "gradients (gradient_average=False); leave gradient_average out"
            )
        if not strategy.averages_weights:
            raise ConfigError(
                f"training_step returned (sum, weight), and strategy {strategy.name!r} averages gradients alone over those that "
                "make a step; return the mean"
            )
        self._strategy = strategy
        self.accumulate = accumulate
        self.total = torch.zeros((), dtype=torch.float64, device=strategy.device)
        """The sum of the weights of this rank's micro-batches in the accumulation."""
        self.reference = torch.zeros_like(self.total)
        if reference is not None:
            self.reference.copy_(reference)
        self._knows_reference = reference is not None
        self.number: float | None = None
        """The last micro-batch's weight, if it was given as a number on the host; else None."""

    def take(self, loss: Tensor, weight: object) -> Tensor:
        """Adds a micro-batch's weight; returns the loss for backward, not yet divided by the number of micro-batches."""
        own = self._on_device(weight)
        if not self._knows_reference:
            self._knows_reference = True
            self.reference.copy_(_power_of_two(self._strategy.reduce(own, "mean"), torch.ones_like(own)))
        self.total += own
        if loss.dtype in HALF_DTYPES:
            loss = loss.float()
        return loss / self.reference.to(loss.dtype)

    def dividing(self, reduce: Callable[[GradientMemory | None], Gradients]) -> Callable[..., Gradients]:
        """Returns ``reduce`` (a strategy's ``reduce_gradients``), wrapped to return the remaining divisor as ``weight`` too."""

        def reduce_weighted(memory: GradientMemory | None = None) -> Gradients:
            return reduce(memory)._replace(weight=self._end_accumulation())

        return reduce_weighted

    def _end_accumulation(self) -> Tensor:
        """Ends an accumulation; returns its divisor: inf if its weight is 0 (gradients are 0 then), nan if it is below 0."""
        mean = self._strategy.reduce(self.total, "sum") / (self.accumulate * self._strategy.world_size)
        divisor = mean / self.reference
        self.reference.copy_(_power_of_two(mean, self.reference))  # in place: a captured graph reads this memory
        self.forget()
        return divisor.masked_fill(divisor == 0, math.inf).masked_fill(divisor < 0, math.nan)

    def forget(self) -> None:
        """Begins a new accumulation."""
        self.total.zero_()

    def requiring_weights(self, forward: Step) -> Step:
        """Returns ``forward``, wrapped to raise for a loss without a weight: it would be counted with a wrong weight."""

        def run(*args: Any) -> Output:
            output = forward(*args)
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor):
                raise mixed()
            return output

        return run

    def outputs(self, output: AnyOutput) -> dict[str, Any]:
        """Returns the outputs for hooks, detached: the mean as "loss", the weight, and the other values of a dict."""
        others = output if isinstance(output, dict) else {}
        total, weight = output["loss"] if others else output
        if isinstance(weight, Tensor):
            weight = weight.reshape(())
        others = {key: value.detach() if isinstance(value, Tensor) else value for key, value in others.items()}
        return {"weight": weight, **others, "loss": total.detach() / weight}

    def _on_device(self, weight: object) -> Tensor:
        self.number = None
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.requires_grad:
            if weight.device == self.total.device:
                return weight.detach().reshape(()).to(torch.float64)
            if weight.device.type == "cpu":  # read without a wait
                weight = weight.item()
        if isinstance(weight, Real) and 0 <= float(weight) < math.inf:
            self.number = float(weight)
            return torch.full_like(self.total, float(weight))
        raise ConfigError(
            f"training_step returned a pair, (sum, weight), whose weight is {_described(weight)}; give a number from 0 or a "
            "tensor with one, detached and on the module's device, such as mask.sum(); other values go into a dict beside 'loss'"
        )


def mixed() -> ConfigError:
    """Returns the error for losses of which some have a weight and others do not."""
    return ConfigError(
        "training_step returned (sum, weight) for some batches and a loss without a weight for others; return (sum, weight) for "
        "all of them, or the mean"
    )


def compare_kinds(strategy: Strategy, *, weighted: bool) -> None:
    """Raises :class:`ConfigError` if losses have a weight on some ranks only: the ranks would wait for each other forever."""
    kinds = strategy.all_gather_object(weighted)
    if not all(kinds) and any(kinds):
        raise ConfigError(
            f"training_step returned (sum, weight) on rank {kinds.index(True)} and a loss without a weight on rank "
            f"{kinds.index(False)}; return (sum, weight) on all of them, or the mean"
        )


def _power_of_two(mean: Tensor, otherwise: Tensor) -> Tensor:
    """Returns the largest power of two not above ``mean``; ``otherwise`` if that is not finite or not above 0."""
    power = mean.log2().floor().exp2()
    return torch.where((power > 0) & power.isfinite(), power, otherwise)


def _described(weight: object) -> str:
    if not isinstance(weight, Tensor):
        return repr(weight) if isinstance(weight, Real) else f"a {type(weight).__name__}"
    graph = " with a graph" if weight.requires_grad else ""
    return f"a tensor of shape {tuple(weight.shape)} on {weight.device}{graph}"


class AccumulationTensors:
    """Saves and restores the tensors of an accumulation in progress beside ``.grad``: sums of gradients, scalers, loss weights.

    ``accumulate`` is the number of micro-batches per step.
    """

    def __init__(
        self, precision: Precision, optimizers: Sequence[Optimizer], accumulate: int, weights: LossWeights | None = None
    ) -> None:
        self._weights = weights
        self._precision = precision
        self._optimizers = optimizers
        self._accumulate = accumulate

    def state(self, loss: Tensor) -> StateDict:
        """Returns the tensors, not copied, followed by the last micro-batch's ``loss``, with precision and ``accumulate``."""
        memories = self._memories()
        sums = [tensor for memory in memories for tensor in memory.tensors]
        tensors = [*sums, *self._others(), loss]
        state: StateDict = {"level": self._level, "accumulate": self._accumulate, "tensors": tensors}
        sparse = [dict(memory.sparse) for memory in memories]
        if any(sparse):  # in one process only: they have no place among tensors that are stacked over the ranks
            state["sparse"] = sparse
        return state if self._weights is None else {**state, "weighted": True}

    def load(self, state: StateDict) -> str:
        """Restores the result of :meth:`state`; returns why that is impossible, or an empty string."""
        for name, current in (("level", self._level), ("accumulate", self._accumulate)):
            if state[name] != current:
                return f"{name} was {state[name]!r} in the checkpoint and is {current!r} here"
        memories = self._memories()
        others = self._others()
        saved = iter(state["tensors"][:-1])
        saved_sums = [list(islice(saved, len(memory.tensors))) for memory in memories]
        saved_others = list(saved)
        sparse = state.get("sparse", [{} for _ in memories])
        fit = all(map(GradientMemory.fits, memories, saved_sums, sparse))
        if not fit or [tensor.shape for tensor in others] != [tensor.shape for tensor in saved_others]:
            return "this run sums gradients in tensors of other shapes"
        for memory, sums, sparse_sums in zip(memories, saved_sums, sparse, strict=True):
            memory.take(sums, sparse_sums)
        for tensor, value in zip(others, saved_others, strict=True):
            tensor.copy_(value)
        return ""

    @property
    def has_sums(self) -> bool:
        """Whether gradients are summed beside ``.grad``, in the order of the optimizers' parameters."""
        return any(memory.tensors for memory in self._memories())

    @property
    def _level(self) -> str:
        # FP8 leaves the sums of its base level as they are, so a window goes on at either.
        precision = self._precision
        return precision.level.name if isinstance(precision, OptLevel) else precision.name

    def _memories(self) -> list[GradientMemory]:
        return [self._precision.gradients(optimizer) for optimizer in self._optimizers]

    def _others(self) -> list[Tensor]:
        """Returns the tensors beside the sums: the states of several losses' scalers, and the sum of the loss weights."""
        step_results = self._precision.verdicts
        scalers = [] if step_results is None else step_results.window_tensors
        return scalers if self._weights is None else [*scalers, self._weights.total]


def forward_train_batches(session: Session) -> None:
    """Runs ``training_step`` on every batch of an epoch: no backward, no update, no hook of a batch, nothing logged.

    Only what ``forward`` itself changes is changed, such as BatchNorm's running statistics.
    """
    state = session.trainer.state
    metrics = session.metrics
    data = session.data
    step = with_index(session.module.training_step, session.module.training_step)
    user_call = state.user_call
    scope = user_call.scope
    batch_before = user_call.batch
    batch_idx = state.batch_idx
    muted = metrics.muted
    set_epoch(data.train_loader, state.epoch)
    feed = data.feed(data.train_loader, data.num_training_batches)
    user_call.scope = Scope.TRAIN_STEP
    metrics.muted = True
    try:
        for number, batch in enumerate(feed):
            user_call.batch = batch
            state.batch_idx = number  # the watchdog sees progress by this number
            session.precision.forward(step, batch, number)
        feed.finish()
    finally:
        user_call.scope = scope
        user_call.batch = batch_before
        state.batch_idx = batch_idx
        metrics.muted = muted
        feed.close()
