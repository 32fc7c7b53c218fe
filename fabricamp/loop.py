"""The hot path: fit -> epoch -> batch -> forward and backward -> update.  Everything is looked up before the first batch."""

from __future__ import annotations

import inspect
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fabricamp.data import set_epoch
from fabricamp.errors import ConfigError
from fabricamp.hooks import Hooks, call_all, overrides
from fabricamp.module import TrainingModule
from fabricamp.precision.base import Precision, clip_gradients, demands_closure
from fabricamp.schedules import Schedules
from fabricamp.state import RunState, Scope
from fabricamp.strategies.base import IN_PLACE, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from fabricamp.data import Feed
    from fabricamp.metrics import Metrics
    from fabricamp.optimization import SchedulerConfig
    from fabricamp.precision.base import Clip, Verdict
    from fabricamp.strategies.base import Gradients
    from fabricamp.watchdog import StopAgreement

__all__ = ["FitLoop", "FitParts", "Limits"]

logger = logging.getLogger("fabricamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When training ends, and what happens every so often.  Checked by the Trainer; None or infinity: no limit."""

    max_epochs: float
    max_steps: float
    min_epochs: int
    min_steps: int
    deadline: float | None
    accumulate: int
    log_every: int
    validate_every: float
    validate_every_epochs: int | None


@dataclass(slots=True, kw_only=True)
class FitParts:
    """What a fit is made of."""

    module: TrainingModule
    state: RunState
    strategy: Strategy
    precision: Precision
    metrics: Metrics
    hooks: Hooks
    agreement: StopAgreement
    feed: Feed
    loader: Any
    step: Callable[..., Any]
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    clip: Clip | None
    limits: Limits
    validate: Callable[[], None] | None


class FitLoop:
    """Runs epochs until a limit or a stop; the only mediator between strategy and precision."""

    def __init__(self, parts: FitParts) -> None:
        self.parts = parts
        self.state = parts.state
        self.strategy = parts.strategy
        self.precision = parts.precision
        self.metrics = parts.metrics
        self.limits = parts.limits
        self._accumulate = parts.limits.accumulate
        self._clip = parts.clip
        self._max_steps = parts.limits.max_steps
        self._validates = parts.validate is not None
        self._buffers = parts.precision.accumulation_buffers()
        self._wrapped = parts.step
        self._step = _with_index(parts.step, parts.module.training_step)
        self._optimizer = parts.optimizers[0] if parts.optimizers and parts.module.automatic_optimization else None
        self._bind_hooks(parts.hooks)
        self._bind_overrides(parts.module)
        self._loss: Tensor | None = None
        self._stepped = False
        self._due = 0
        self._unreported_skips = 0
        self._manual_clips: dict[Optimizer, Clip] = {}
        self.schedules = Schedules(
            parts.schedulers if parts.module.automatic_optimization else [], parts.module, parts.metrics, parts.state
        )
        # With a lag the schedules follow the verdicts instead.
        self._advances_at_once = self.schedules.follow_steps and parts.precision.lag == 0

    def _bind_hooks(self, hooks: Hooks) -> None:
        self._batch_start = hooks("on_train_batch_start")
        self._batch_end = hooks("on_train_batch_end")
        self._before_zero_grad = hooks("on_before_zero_grad")
        self._before_backward = hooks("on_before_backward")
        self._after_backward = hooks("on_after_backward")
        self._before_step = hooks("on_before_optimizer_step")

    def _bind_overrides(self, module: TrainingModule) -> None:
        own = partial(overrides, module, base=TrainingModule)
        self._run_backward: Callable[..., Any] = module.backward if own("backward") else Tensor.backward
        # What only passes a call on is left out of it: a Python call costs as much as three hooks.
        precision = self.precision
        scales = overrides(precision, "backward", Precision)
        self._forward = (
            partial(precision.forward, self._step) if overrides(precision, "forward", Precision) else self._step
        )
        self._backward = partial(precision.backward, run=self._run_backward) if scales else self._run_backward
        self._closes = overrides(precision, "close_window", Precision)
        self._exchanges = self._buffers is not None or overrides(self.strategy, "reduce_gradients", Strategy)
        self._own_zero_grad = module.optimizer_zero_grad if own("optimizer_zero_grad") else None
        self._own_clipping = module.configure_gradient_clipping if own("configure_gradient_clipping") else None
        self._own_step = module.optimizer_step if own("optimizer_step") else None
        # Only then are gradients unscaled in a pass of their own, before the update.
        self._gradients_are_seen = bool(self._before_step or self._own_clipping or self._own_step)
        if not module.automatic_optimization:
            self._run_batch: Callable[[Any, int, bool], Any] = self._run_manual
        elif self._optimizer is not None and demands_closure(self._optimizer):
            self._run_batch = self._run_with_closure
        else:
            self._run_batch = self._run_automatic

    # -- epochs ------------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until a limit or a stop."""
        state, hooks = self.state, self.parts.hooks
        if self.parts.feed.limit == 0:  # limit_train_batches=0: nothing is trained
            return
        state.scope = Scope.TRAIN_EPOCH
        call_all(hooks("on_train_start"))
        epoch_start = hooks("on_train_epoch_start")
        # The order at the end of an epoch: callbacks, module, reduction over ranks, then those that read the reduced values.
        epoch_end = hooks.callbacks("on_train_epoch_end", monitors=False) + hooks.module("on_train_epoch_end")
        monitors = hooks.callbacks("on_train_epoch_end", monitors=True)
        while not self._done():
            state.scope = Scope.TRAIN_EPOCH
            set_epoch(self.parts.loader, state.epoch)
            call_all(epoch_start)
            self._follow_freezing()
            complete = self._catch_up() and self._run_epoch()
            state.scope = Scope.TRAIN_EPOCH
            call_all(epoch_end)
            self.metrics.end_train_epoch(state.global_step)
            if complete:
                self.schedules.end_epoch_monitored(self.state.epoch)
            state.epoch_ended, state.scope = complete, Scope.NOWHERE  # what is logged now would be in no epoch
            call_all(monitors)
            if complete:
                state.epoch += 1
                state.batch_idx = 0
            state.epoch_ended = False
        self._unreported_skips += sum(not verdict.applied for verdict in self.precision.drain())
        self._report_skips()
        self.metrics.drain()
        call_all(hooks("on_train_end"))

    def _follow_freezing(self) -> None:
        """Hooks may have frozen or unfrozen parameters; the strategy then wraps the step anew."""
        wrapped = self.strategy.rewrap_module(self._wrapped)
        if wrapped is not self._wrapped:
            self._wrapped = wrapped
            self._step = _with_index(wrapped, self.parts.module.training_step)
            self._bind_overrides(self.parts.module)

    def _catch_up(self) -> bool:
        """Runs the validation that a resumed run was cut before; returns whether training goes on."""
        state = self.state
        pending = not state.validated and state.batch_idx > 0 and self._validates
        state.validated = True
        if not pending or not self._validation_is_due(state.batch_idx >= self.parts.feed.limit):
            return True
        self._validate()
        return not self._done(in_epoch=True)

    def _run_epoch(self) -> bool:
        """Runs the micro-batches of an epoch; returns whether it came to the loader's end."""
        state, feed = self.state, self.parts.feed
        batch_start, batch_end, run_batch = self._batch_start, self._batch_end, self._run_batch
        state.scope = Scope.TRAIN_STEP
        # A resumed epoch may have been saved after its last batch: then there is nothing left but to end it.
        last = state.batch_idx > 0
        for batch in feed.behind(state.batch_idx):
            state.batch = batch
            batch_idx, last = state.batch_idx, feed.last
            # A list: every hook is called, whatever the first one answers.
            if batch_start and -1 in [hook(batch, batch_idx) for hook in batch_start]:
                last, self._loss = True, None  # a window that was begun is dropped
                self.schedules.end_epoch(state.epoch)
                break
            outputs = run_batch(batch, batch_idx, last)
            if last:
                self.schedules.end_epoch(self.state.epoch)
            # Counted before the hooks: a checkpoint that one of them writes goes on behind this batch.
            state.batch_idx = batch_idx + 1
            state.batches_done += 1
            for hook in batch_end:
                hook(outputs, batch, batch_idx)
            if self._stepped and state.global_step >= self._due:
                self._after_step()
            if self._validates and self._validation_is_due(last):
                self._validate()
            if state.batches_done >= state.hold_at:
                self.parts.agreement.hold()
            if self._stepped or last:
                self._stepped = False
                if (state.should_stop or state.global_step >= self._max_steps) and self._done(in_epoch=True):
                    break
        self._check_fed()
        state.batch = None
        return last

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
        return state.stop_reason == "interrupted" or (
            state.global_step >= limits.min_steps and state.epoch >= limits.min_epochs
        )

    def _after_step(self) -> None:
        """What is not to be done at every step: flushes and their arrival, the look at the clock."""
        step, limits = self.state.global_step, self.limits
        self.metrics.poll(step)
        if step % limits.log_every == 0:
            self.metrics.flush(step)
            self._report_skips()
        self._due = min(self.metrics.due, step - step % limits.log_every + limits.log_every)
        if limits.deadline is not None:
            self._due = step + 1
            if time.monotonic() >= limits.deadline:
                self.parts.agreement.request("max_time")

    # -- one micro-batch ---------------------------------------------------------------------------------------------------------

    def _run_automatic(self, batch: Any, batch_idx: int, last: bool) -> Any:
        ends_window = last or (batch_idx + 1) % self._accumulate == 0
        if ends_window and self._buffers is None:
            outputs = self._forward_backward(batch, batch_idx)
        else:
            with self.strategy.no_sync():
                outputs = self._forward_backward(batch, batch_idx)
        if ends_window and self._loss is not None:
            self._update(batch_idx)
        return outputs

    def _forward_backward(self, batch: Any, batch_idx: int) -> Any:
        output = self._forward(batch, batch_idx)
        loss = output if isinstance(output, Tensor) else self._loss_of(output)
        if loss is None:
            return None
        if not loss.requires_grad or loss.numel() != 1:
            self._refuse_loss(loss)
        if self._loss is None:
            self._clear_gradients(batch_idx)
        self._loss = loss
        if self._accumulate > 1:
            loss = loss / self._accumulate
        for hook in self._before_backward:
            hook(loss)
        self._backward(loss)
        for hook in self._after_backward:
            hook()
        if self._buffers is not None:
            self.precision.accumulate()
        return self._detached(output) if self._batch_end else None

    def _clear_gradients(self, batch_idx: int) -> None:
        """Clears what the window before left: called by its first micro-batch that has a loss, after the forward."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for hook in self._before_zero_grad:
            hook(optimizer)
        if self._own_zero_grad is not None:
            self._own_zero_grad(self.state.epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _update(self, batch_idx: int) -> None:
        optimizer, loss = self._optimizer, self._loss
        self._loss = None
        if optimizer is not None:
            gradients = self.strategy.reduce_gradients(buffers=self._buffers) if self._exchanges else IN_PLACE
            if self._gradients_are_seen:
                self._show_gradients(optimizer, gradients, batch_idx, loss)
            else:
                self.precision.step(optimizer, gradients, self._clip)
        self._close_window(loss)

    def _show_gradients(self, optimizer: Optimizer, gradients: Gradients, batch_idx: int, loss: Tensor | None) -> None:
        """Updates where hooks or overridden methods look at the gradients first: unscaled, in ``.grad``."""
        clip, run = self._clip, None
        self.precision.unscale(optimizer, gradients)
        for hook in self._before_step:
            hook(optimizer)
        if self._own_clipping is not None:
            self._own_clipping(optimizer, clip and clip.value, clip and clip.algorithm)
            clip = None
        if self._own_step is not None:
            run = partial(self._own_step, self.state.epoch, batch_idx, optimizer, lambda: loss)
        self.precision.step(optimizer, gradients, clip, run)

    def _close_window(self, loss: Tensor | None) -> None:
        verdict = self.precision.close_window(loss) if self._closes else None
        self.state.global_step += 1
        self._stepped = True
        if verdict is not None:
            self._heed(verdict)
        elif self._advances_at_once:
            self.schedules.advance(self.state.global_step)

    def _heed(self, verdict: Verdict) -> None:
        """Acts on what became of the window ``lag`` windows ago: schedules follow applied steps."""
        if verdict.applied:
            self.schedules.advance(verdict.applied_steps)
            return
        self._unreported_skips += 1
        if verdict.skipped_steps == 1:
            self._report_skips()

    # -- other ways to make an update --------------------------------------------------------------------------------------------

    def _run_manual(self, batch: Any, batch_idx: int, last: bool) -> Any:
        output = self._forward(batch, batch_idx)
        if self._stepped:
            self._close_window(self._loss)
            self._loss = None
        return self._detached(output) if self._batch_end else None

    def manual_backward(self, loss: Tensor, *args: Any, loss_id: int = 0, **options: Any) -> None:
        """What ``TrainingModule.manual_backward`` runs."""
        self._loss = loss.detach()
        for hook in self._before_backward:
            hook(loss)
        self.precision.backward(
            loss, loss_id, partial(self._run_backward, *args) if args else self._run_backward, **options
        )
        for hook in self._after_backward:
            hook()

    def manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """What ``step`` of an optimizer from ``TrainingModule.optimizers()`` runs."""
        if closure is not None and demands_closure(optimizer):
            self._stepped = True
            try:
                return optimizer.step(partial(self._counted_once, optimizer, closure))
            finally:
                self.metrics.muted = False
        result = closure() if closure is not None else None
        sums = self.precision.accumulation_buffers(optimizer)
        holders = self.precision.gradient_holders(optimizer) if sums is None else None
        gradients = self.strategy.reduce_gradients(holders, sums)
        if self._before_step:
            self.precision.unscale(optimizer, gradients)
            for hook in self._before_step:
                hook(optimizer)
        self.precision.step(optimizer, gradients, self._manual_clips.pop(optimizer, None))
        self._stepped = True
        return result

    def manual_clip(self, optimizer: Optimizer, clip: Clip) -> None:
        """What ``TrainingModule.clip_gradients`` runs: the next step clips, once gradients are averaged and unscaled."""
        if demands_closure(optimizer):
            clip_gradients(optimizer, clip)
        else:
            self._manual_clips[optimizer] = clip

    def _run_with_closure(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """LBFGS: the optimizer calls forward and backward itself, as often as it likes; ``self.log`` counts the first call."""
        optimizer = cast("Optimizer", self._optimizer)
        outputs: list[Any] = []

        def forward_backward() -> Tensor:
            self._loss = None
            outputs.append(self._forward_backward(batch, batch_idx))
            loss = cast("Tensor | None", self._loss)
            if loss is None:
                name = type(optimizer).__name__
                raise ConfigError(f"training_step returned None, but {name} needs the loss of every forward; return it")
            return loss

        def closure() -> Tensor:
            loss: Tensor = self._counted_once(optimizer, forward_backward)
            if self._own_clipping is not None:
                self._own_clipping(optimizer, self._clip and self._clip.value, self._clip and self._clip.algorithm)
            elif self._clip is not None:
                clip_gradients(optimizer, self._clip)
            return loss

        try:
            if self._own_step is not None:
                self._own_step(self.state.epoch, batch_idx, optimizer, closure)
            else:
                optimizer.step(closure)  # type: ignore[arg-type]  # the closure returns the loss tensor
        finally:
            self.metrics.muted = False
        loss, self._loss = self._loss, None
        self._close_window(loss)
        return outputs[0] if outputs else None

    def _counted_once(self, optimizer: Optimizer, forward_backward: Callable[[], Any]) -> Any:
        """Runs a forward that the optimizer asks for, perhaps again and again: ``self.log`` counts the first of a step."""
        result = forward_backward()
        self.metrics.muted = True
        for hook in self._before_step:
            hook(optimizer)
        return result

    # -- validation in between, messages -----------------------------------------------------------------------------------------

    def _validation_is_due(self, last: bool) -> bool:
        limits, state = self.limits, self.state
        if limits.validate_every_epochs is None:
            return state.batches_done % limits.validate_every == 0
        if (state.epoch + 1) % limits.validate_every_epochs:
            return False
        return last if limits.validate_every == float("inf") else state.batch_idx % limits.validate_every == 0

    def _validate(self) -> None:
        validate = cast("Callable[[], None]", self.parts.validate)
        if self._loss is None:
            self.parts.module.on_validation_model_zero_grad()
        self.state.batch = None
        validate()
        self.state.scope = Scope.TRAIN_STEP

    def _report_skips(self) -> None:
        if self._unreported_skips and self.strategy.rank == 0:
            logger.warning(
                "fabricamp: %d of the last steps overflowed in half precision and were skipped (%d in all, loss scale now %g); "
                "a skip now and then is how the scale is found",
                self._unreported_skips, self.precision.skipped_steps, self.precision.scale,
            )  # fmt: skip
        self._unreported_skips = 0

    def _loss_of(self, output: Any) -> Tensor | None:
        if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
            return cast("Tensor", output["loss"])
        if output is None and self.strategy.world_size == 1:
            return None
        if output is None:
            raise ConfigError(
                f"training_step returned None on rank {self.strategy.rank}: with several processes every rank has to return a "
                "loss, or the others wait for its gradients; return `0.0 * loss` instead"
            )
        given = f"a dict with keys {sorted(output)}" if isinstance(output, dict) else type(output).__name__
        raise ConfigError(
            f"training_step returned {given}; return the loss as a tensor, or a dict with it under 'loss'"
        )

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

    @staticmethod
    def _detached(output: Any) -> Any:
        """What hooks get: always a dict, nothing of the graph."""
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        if isinstance(output, dict):
            return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        return output


def _with_index(step: Callable[..., Any], training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``step`` as a call with (batch, batch_idx), whichever of them ``training_step`` takes."""
    signature = inspect.signature(training_step)
    for arguments in ((None, 0), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return step if len(arguments) == 2 else lambda batch, _: step(batch)
    raise ConfigError(f"training_step takes {signature}; it gets (batch) or (batch, batch_idx)")
