"""From a micro-batch to a loss, and at the end of a window to an update: automatic optimization."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.engine.bound import bound_to
from fabricamp.engine.loss_weights import LossWeights, compare_kinds, mixed
from fabricamp.engine.outcomes import Outcomes
from fabricamp.engine.schedules import Schedules
from fabricamp.engine.window import WindowTensors
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.hooks import overrides
from fabricamp.precision.base import Precision
from fabricamp.precision.nonfinite import LossWatch
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from fabricamp.engine.parts import FitParts
    from fabricamp.gradients.flat import Gradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.base import Clip


class Update:
    """Runs micro-batches and makes an update of each window: the only mediator between strategy and precision.

    Whatever can be looked up is, before the first batch.

    ``stepped`` is True from an update until the loop takes note of it; ``loss`` is that of an open window's last micro-batch.
    ``weights`` are there once a loss came with a weight; ``reference`` is what a run that goes on has of them.
    """

    def __init__(self, parts: FitParts) -> None:
        automatic, precision, clip = parts.module.automatic_optimization, parts.precision, parts.clip
        self.stepped = False
        self.loss: Tensor | None = None
        self.schedules = Schedules(parts.schedulers if automatic else [], parts.module, parts.metrics, parts.state)
        self._parts = parts
        self._state = parts.state
        self._accumulate = parts.limits.settings.accumulate_grad_batches
        self._partial = parts.limits.settings.partial_window
        self._steps_at_end = self._partial == "step"
        self._ahead = 1  # of batch_idx, in micro-batches since a window began
        self._whole = True
        self._optimizer = parts.optimizers[0] if parts.optimizers and automatic else None
        self._sums = self._optimizer is not None and precision.gradients(self._optimizer).flat is not None
        self._memory: Callable[[], GradientMemory] | None = None
        if self._optimizer is not None and (self._sums or parts.strategy.asks_for_parameters):
            self._memory = partial(precision.gradients, self._optimizer)
        self._exchanges = self._sums or overrides(parts.strategy, "reduce_gradients", Strategy)
        self._reduce = parts.strategy.reduce_gradients
        self.weights: LossWeights | None = None
        self.reference: Tensor | None = None
        self.outcomes: Outcomes | None = None
        verdicts = precision.verdicts
        if verdicts is None:
            parts.metrics.sinks.append(LossWatch())  # what nothing looks at on the device
        else:
            self.outcomes = Outcomes(verdicts, self.schedules, parts.state, parts.strategy)
        self._advances_at_once = self.schedules.follow_steps and not (verdicts and verdicts.schedules_follow)
        alone = not (self._exchanges or self.outcomes or clip or self._advances_at_once)
        self._bound = bound_to(parts, self._optimizer, steps_alone=alone)
        # Whether no rank knows yet of another whether its losses have a weight.
        self._compares = automatic and parts.strategy.world_size > 1
        if self._compares:
            self._bound = replace(self._bound, before_backward=[self._settle_kind, *self._bound.before_backward])
        self.use(parts.step)

    def use(self, step: Callable[..., Any]) -> None:
        """Takes the step to run: ``training_step``, as the strategy has wrapped it."""
        precision = self._parts.precision
        step = with_index(step, self._parts.module.training_step)
        through = overrides(precision, "forward", Precision)
        self._forward = partial(precision.forward, step) if through else step
        if self.weights is not None:
            self._forward = self.weights.watched(self._forward)

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of an epoch as the loop takes them."""
        return self._begun(batches) if self._parts.strategy.heals else batches

    def _begun(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Lets the strategy begin each step before its first batch is read: where everything is as a checkpoint would have it."""
        end = object()
        while True:
            if self._state.open_batches == 0 and not self._parts.feed.last:
                self._parts.strategy.begin_step()
            batch = next(batches, end)
            if batch is end:
                return
            yield batch
            del batch

    def run_batch(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs a micro-batch, the ``last`` of its epoch or not; returns what the hooks after it get."""
        ends_window = self._ends_window(batch_idx, last)
        if ends_window and not self._sums:
            outputs = self._forward_backward(batch, batch_idx)
        else:
            with self._parts.strategy.no_sync():
                outputs = self._forward_backward(batch, batch_idx)
        if ends_window and self.loss is not None:
            if (plain_step := self._bound.plain_step) is None:
                loss, self.loss = self.loss, None
                self._launch_update(loss, batch_idx)
                self._note_update()
            else:
                self.loss = None
                plain_step()
                self._state.global_step += 1
                self.stepped = True
        if ends_window:
            self._state.open_batches = 0
        else:
            self._state.open_batches += 1
            self._whole = True
        return outputs

    def _ends_window(self, batch_idx: int, last: bool) -> bool:
        return (batch_idx + self._ahead) % self._accumulate == 0 or (last and self._steps_at_end)

    def begin_epoch(self, batch_idx: int) -> None:
        """Called before an epoch's first batch, or that which a resumed run goes on with."""
        settings = self._parts.limits.settings
        if settings.accumulation_schedule is not None:
            self._accumulate = settings.accumulate_grad_batches
            if self.weights is not None:
                self.weights.accumulate = self._accumulate
        # Where a window was carried over, and where other ranks or batch sizes go on at a place that is no window's end to them.
        self._ahead = 1 + (self._state.open_batches - batch_idx) % self._accumulate

    def end_epoch(self) -> None:
        """Called behind the loader's last batch."""
        if self._partial == "drop":
            self.drop_window()
        self.schedules.end_epoch(self._state.epoch)

    def drop_window(self) -> None:
        """Forgets a window that was begun."""
        self.loss = None
        self._state.open_batches = 0
        self._parts.strategy.note_window(begun=False)
        if self.weights is not None:
            self.weights.forget()

    def window_state(self) -> dict[str, Any] | None:
        """Returns what the open window has beside ``.grad``; None where none is open, or a micro-batch is in the middle of it."""
        if self.loss is None or not self._whole:
            return None
        return self._window_tensors().taken(self.loss.detach())

    def load_window_state(self, window: dict[str, Any]) -> str:
        """Takes back what :meth:`window_state` gave; returns why it cannot, or an empty string."""
        if window.get("weighted"):
            self._weigh()
        problem = self._window_tensors().give_back(window)
        if not problem:
            self.loss = window["tensors"][-1].to(self._parts.strategy.device)
        return problem

    def _window_tensors(self) -> WindowTensors:
        return WindowTensors(self._parts.precision, self._parts.optimizers, self._accumulate, self.weights)

    def _forward_backward(self, batch: Any, batch_idx: int) -> Any:
        bound, output = self._bound, self._forward(batch, batch_idx)
        loss = output if isinstance(output, Tensor) else self._loss_of(output)
        if loss is None:
            return None
        if not loss.requires_grad or loss.numel() != 1:
            self._refuse_loss(loss)
        if self.loss is None:
            if bound.plain_zero_grad is None:
                self._clear_gradients(batch_idx)
            else:
                bound.plain_zero_grad()
        self.loss = loss
        if self._accumulate > 1:
            loss = loss / self._accumulate
            self._whole = False
        for hook in bound.before_backward:
            hook(loss)
        bound.backward(loss)
        for hook in bound.after_backward:
            hook()
        if self._sums and self._memory is not None:
            self._memory().add()
        if not bound.wants_outputs:
            return None
        return {"loss": output.detach()} if isinstance(output, Tensor) else self._detached(output)

    def _settle_kind(self, _: Tensor) -> None:
        """Stands before the first backward, and is gone behind it: losses have a weight on all ranks or on none."""
        self._bound = replace(self._bound, before_backward=self._bound.before_backward[1:])
        if self.weights is None:
            self._compares = False
            compare_kinds(self._parts.strategy, weighted=False)

    def _clear_gradients(self, batch_idx: int) -> None:
        """Clears what the window before left: called by its first micro-batch that has a loss, after the forward."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for hook in self._bound.before_zero_grad:
            hook(optimizer)
        if self._bound.zero_grad is not None:
            self._bound.zero_grad(self._state.epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _launch_update(self, loss: Tensor | None, batch_idx: int = 0) -> None:
        """What an update does on the device: exchange, step, the end of the window."""
        optimizer, parts = self._optimizer, self._parts
        if optimizer is not None:
            memory = None if self._memory is None else self._memory()
            gradients = self._reduce(memory) if self._exchanges else IN_PLACE
            if self._bound.shows_gradients:
                self._show_gradients(optimizer, gradients, batch_idx, loss)
            else:
                parts.precision.step(optimizer, gradients, parts.clip, loss=loss)
        if self.outcomes is not None:
            self.outcomes.launch_close(loss)

    def _note_update(self) -> None:
        """What only the host does behind an update: counters, schedules, and what became of earlier ones."""
        self._state.global_step += 1
        self.stepped = True
        if self._advances_at_once:
            self.schedules.advance(self._state.global_step)
        if self.outcomes is not None:
            self.outcomes.note_closed()

    def _show_gradients(self, optimizer: Optimizer, gradients: Gradients, batch_idx: int, loss: Tensor | None) -> None:
        """Updates where hooks or overridden methods look at the gradients first: unscaled, in ``.grad``."""
        bound, clip, run = self._bound, self._parts.clip, None

        def look() -> Clip | None:
            for hook in bound.before_step:
                hook(optimizer)
            if bound.clipping is None:
                return clip
            bound.clipping(optimizer, clip)
            return None

        if bound.step is not None:
            run = partial(bound.step, self._state.epoch, batch_idx, optimizer, lambda: loss)
        self._parts.precision.step(optimizer, gradients, run=run, look=look)

    def counted_once(self, optimizer: Optimizer, forward_backward: Callable[[], Any]) -> Any:
        """Runs a forward that the optimizer asks for, perhaps again and again: ``self.log`` counts the first of a step."""
        result = forward_backward()
        self._parts.metrics.muted = True
        for hook in self._bound.before_step:
            hook(optimizer)
        return result

    def _loss_of(self, output: Any) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            return loss
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor):
            if self._compares and self.weights is None:
                compare_kinds(self._parts.strategy, weighted=True)
            return self._weigh().take(*loss)
        if output is None and not self._parts.strategy.lockstep:
            return None
        if output is None:
            raise ConfigError(
                f"training_step returned None on rank {self._parts.strategy.rank}: with several processes every rank has to "
                "return a loss, or the others wait for its gradients; return `0.0 * loss` instead"
            )
        given = f"a dict with keys {sorted(output)}" if isinstance(output, dict) else type(output).__name__
        raise ConfigError(
            f"training_step returned {given}; return the loss as a tensor or as (sum, weight), or a dict with it under 'loss'"
        )

    def _weigh(self) -> LossWeights:
        """Returns the weights of losses; from the first call on windows are divided by theirs."""
        if self.weights is None:
            if self.loss is not None or (self._parts.strategy.world_size > 1 and not self._compares):
                raise mixed()
            self.weights = LossWeights(self._parts.strategy, self._accumulate, self.reference)
            self._forward = self.weights.watched(self._forward)
            self._bound = replace(self._bound, plain_step=None)
            self._exchanges, self._reduce = True, self.weights.dividing(self._reduce)
        return self.weights

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

    def _detached(self, output: Any) -> Any:
        """What hooks get: always a dict, nothing of the graph."""
        if self.weights is not None:
            return self.weights.shown(output)
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        if isinstance(output, dict):
            return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        return output


def with_index(step: Callable[..., Any], training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``step`` as a call with (batch, batch_idx), whichever of them ``training_step`` takes."""
    signature = inspect.signature(training_step)
    for arguments in ((None, 0), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return step if len(arguments) == 2 else lambda batch, _: step(batch)
    raise ConfigError(f"training_step takes {signature}; it gets (batch) or (batch, batch_idx)")
