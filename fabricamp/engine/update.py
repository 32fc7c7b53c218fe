"""From a micro-batch to a loss, and at the end of a window to an update: automatic optimization."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fabricamp.engine.outcomes import Outcomes
from fabricamp.engine.schedules import Schedules
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.precision.base import Precision
from fabricamp.precision.nonfinite import LossWatch
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from fabricamp.engine.parts import FitParts
    from fabricamp.gradients.flat import Gradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.base import Clip


class Update:
    """Runs micro-batches and makes an update of each window: the only mediator between strategy and precision.

    Whatever can be looked up is, before the first batch.

    ``stepped`` is True from an update until the loop takes note of it; ``loss`` is that of an open window's last micro-batch.
    """

    def __init__(self, parts: FitParts) -> None:
        automatic = parts.module.automatic_optimization
        self.stepped = False
        self.loss: Tensor | None = None
        self.schedules = Schedules(parts.schedulers if automatic else [], parts.module, parts.metrics, parts.state)
        self._module = parts.module
        self._state = parts.state
        self._strategy = parts.strategy
        self._precision = parts.precision
        self._metrics = parts.metrics
        self._accumulate = parts.limits.settings.accumulate_grad_batches
        self._whole = True
        self._clip = parts.clip
        self._optimizer = parts.optimizers[0] if parts.optimizers and automatic else None
        self._optimizers = parts.optimizers
        self._sums = False
        self._memory: Callable[[], GradientMemory] | None = None
        if self._optimizer is not None:
            self._sums = parts.precision.gradients(self._optimizer).flat is not None
            if self._sums or parts.strategy.asks_for_parameters:
                self._memory = partial(parts.precision.gradients, self._optimizer)
        self.outcomes: Outcomes | None = None
        verdicts = parts.precision.verdicts
        if verdicts is None:
            parts.metrics.sinks.append(LossWatch())  # what nothing looks at on the device
        else:
            self.outcomes = Outcomes(verdicts, self.schedules, parts.state, parts.strategy)
        self._advances_at_once = self.schedules.follow_steps and not (verdicts and verdicts.schedules_follow)
        self._plain_step: Callable[[], Any] | None = None
        self._plain_zero_grad: Callable[[], Any] | None = None
        self._bind(parts)
        self.use(parts.step)

    def _bind(self, parts: FitParts) -> None:
        hooks, module = parts.hooks, parts.module
        own = partial(overrides, module, base=TrainingModule)
        self._wants_outputs = bool(hooks("on_train_batch_end"))
        self._before_zero_grad = hooks("on_before_zero_grad")
        self._before_backward = hooks("on_before_backward")
        self._after_backward = hooks("on_after_backward")
        self._before_step = hooks("on_before_optimizer_step")
        self._own_zero_grad = module.optimizer_zero_grad if own("optimizer_zero_grad") else None
        self._own_clipping = module.configure_gradient_clipping if own("configure_gradient_clipping") else None
        self._own_step = module.optimizer_step if own("optimizer_step") else None
        # Only then are gradients unscaled in a pass of their own, before the update.
        self._gradients_are_seen = bool(self._before_step or self._own_clipping or self._own_step)
        self._run_backward: Callable[..., Any] = module.backward if own("backward") else Tensor.backward
        # What only passes a call on is left out of it: a Python call costs as much as three hooks.
        scales = overrides(self._precision, "backward", Precision)
        self._backward = partial(self._precision.backward, run=self._run_backward) if scales else self._run_backward
        self._exchanges = self._sums or overrides(self._strategy, "reduce_gradients", Strategy)
        self._bind_plain()

    def _bind_plain(self) -> None:
        """Where nothing of fabricamp's or the user's stands around the optimizer's own methods, these are called and no others."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if not (self._before_zero_grad or self._own_zero_grad):
            self._plain_zero_grad = optimizer.zero_grad
        ours = self._exchanges or self.outcomes or self._clip or self._advances_at_once
        if not (ours or self._gradients_are_seen or overrides(self._precision, "step", Precision)):
            self._plain_step = optimizer.step

    def use(self, step: Callable[..., Any]) -> None:
        """Takes the step to run: ``training_step``, as the strategy has wrapped it."""
        step = _with_index(step, self._module.training_step)
        through = overrides(self._precision, "forward", Precision)
        self._forward = partial(self._precision.forward, step) if through else step

    def run_batch(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs a micro-batch, the ``last`` of its epoch or not; returns what the hooks after it get."""
        ends_window = last or (batch_idx + 1) % self._accumulate == 0
        if ends_window and not self._sums:
            outputs = self._forward_backward(batch, batch_idx)
        else:
            with self._strategy.no_sync():
                outputs = self._forward_backward(batch, batch_idx)
        if ends_window and self.loss is not None:
            if self._plain_step is None:
                self._update(batch_idx)
            else:
                self.loss = None
                self._plain_step()
                self._state.global_step += 1
                self.stepped = True
        if ends_window:
            self._state.open_batches = 0
        else:
            self._state.open_batches += 1
            self._whole = True
        return outputs

    def drop_window(self) -> None:
        """Forgets a window that was begun."""
        self.loss = None
        self._state.open_batches = 0

    def window_state(self) -> dict[str, Any] | None:
        """Returns what the open window has beside ``.grad``; None where none is open, or a micro-batch is in the middle of it."""
        if self.loss is None or not self._whole:
            return None
        return self._open_window(self.loss.detach())

    def _open_window(self, loss: Tensor) -> dict[str, Any]:
        tensors = [*self._window_tensors(), loss]
        return {"level": self._precision.name, "accumulate": self._accumulate, "tensors": tensors}

    def _window_tensors(self) -> list[Tensor]:
        """What a window is in beside ``.grad``: sums, and what is known of each of several losses."""
        return [*(tensor for memory in self._memories() for tensor in memory.tensors), *self._tensors_beside()]

    def _memories(self) -> list[GradientMemory]:
        return [self._precision.gradients(one) for one in self._optimizers]

    def _tensors_beside(self) -> list[Tensor]:
        verdicts = self._precision.verdicts
        return [] if verdicts is None else verdicts.window_tensors

    def load_window_state(self, window: dict[str, Any]) -> str:
        """Takes back what :meth:`window_state` gave; returns why it cannot, or an empty string."""
        for name, here in (("level", self._precision.name), ("accumulate", self._accumulate)):
            if window[name] != here:
                return f"{name} was {window[name]!r} there and is {here!r} here"
        *saved, loss = window["tensors"]
        memories, beside, values = self._memories(), self._tensors_beside(), iter(saved)
        sums = [list(islice(values, len(memory.tensors))) for memory in memories]
        rest = list(values)
        fit = all(memory.fits(one) for memory, one in zip(memories, sums, strict=True))
        if not fit or [tensor.shape for tensor in beside] != [tensor.shape for tensor in rest]:
            return "gradients are summed in other tensors"
        for memory, one in zip(memories, sums, strict=True):
            memory.take(one)
        for tensor, value in zip(beside, rest, strict=True):
            tensor.copy_(value)
        self.loss = loss.to(self._strategy.device)
        return ""

    def _forward_backward(self, batch: Any, batch_idx: int) -> Any:
        output = self._forward(batch, batch_idx)
        loss = output if isinstance(output, Tensor) else self._loss_of(output)
        if loss is None:
            return None
        if not loss.requires_grad or loss.numel() != 1:
            self._refuse_loss(loss)
        if self.loss is None:
            if self._plain_zero_grad is None:
                self._clear_gradients(batch_idx)
            else:
                self._plain_zero_grad()
        self.loss = loss
        if self._accumulate > 1:
            loss = loss / self._accumulate
            self._whole = False
        for hook in self._before_backward:
            hook(loss)
        self._backward(loss)
        for hook in self._after_backward:
            hook()
        if self._sums and self._memory is not None:
            self._memory().add()
        if not self._wants_outputs:
            return None
        return {"loss": output.detach()} if isinstance(output, Tensor) else self._detached(output)

    def _clear_gradients(self, batch_idx: int) -> None:
        """Clears what the window before left: called by its first micro-batch that has a loss, after the forward."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for hook in self._before_zero_grad:
            hook(optimizer)
        if self._own_zero_grad is not None:
            self._own_zero_grad(self._state.epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _update(self, batch_idx: int) -> None:
        optimizer, loss = self._optimizer, self.loss
        self.loss = None
        if optimizer is not None:
            memory = None if self._memory is None else self._memory()
            gradients = self._strategy.reduce_gradients(memory) if self._exchanges else IN_PLACE
            if self._gradients_are_seen:
                self._show_gradients(optimizer, gradients, batch_idx, loss)
            else:
                self._precision.step(optimizer, gradients, self._clip, loss=loss)
        self._close_window(loss)

    def _show_gradients(self, optimizer: Optimizer, gradients: Gradients, batch_idx: int, loss: Tensor | None) -> None:
        """Updates where hooks or overridden methods look at the gradients first: unscaled, in ``.grad``."""
        run = None

        def look() -> Clip | None:
            for hook in self._before_step:
                hook(optimizer)
            if self._own_clipping is None:
                return self._clip
            self._own_clipping(optimizer, self._clip and self._clip.value, self._clip and self._clip.algorithm)
            return None

        if self._own_step is not None:
            run = partial(self._own_step, self._state.epoch, batch_idx, optimizer, lambda: loss)
        self._precision.step(optimizer, gradients, run=run, look=look)

    def _close_window(self, loss: Tensor | None) -> None:
        self._state.global_step += 1
        self.stepped = True
        if self._advances_at_once:
            self.schedules.advance(self._state.global_step)
        if self.outcomes is not None:
            self.outcomes.close_window(loss)

    def counted_once(self, optimizer: Optimizer, forward_backward: Callable[[], Any]) -> Any:
        """Runs a forward that the optimizer asks for, perhaps again and again: ``self.log`` counts the first of a step."""
        result = forward_backward()
        self._metrics.muted = True
        for hook in self._before_step:
            hook(optimizer)
        return result

    def _loss_of(self, output: Any) -> Tensor | None:
        if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
            return cast("Tensor", output["loss"])
        if output is None and self._strategy.world_size == 1:
            return None
        if output is None:
            raise ConfigError(
                f"training_step returned None on rank {self._strategy.rank}: with several processes every rank has to return a "
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
