"""Other ways to make an update: in the user's training_step (manual optimization), or by an optimizer that calls the forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from fabricamp.engine.update import Update
from fabricamp.errors import ConfigError
from fabricamp.precision.base import Clip
from fabricamp.precision.torch_updates import clip_gradients, demands_closure, write_gradients

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch, Closure, Output, StateDict
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import LossWeights
    from fabricamp.precision.update_plan import UpdatePlan


class ManualUpdate(Update):
    """Manual optimization: ``training_step`` calls ``manual_backward``, and ``step`` of what ``optimizers()`` returned."""

    def __init__(self, parts: FitParts) -> None:
        super().__init__(parts)
        self._clips: dict[Optimizer, Clip] = {}
        self._plans: dict[Optimizer, UpdatePlan] = {}
        """The update of each optimizer, from its first step on."""
        self._not_stepped = set(parts.optimizers)
        self._accumulates = False  # whether a training_step has ended with gradients that no step used
        self._scales = parts.precision.state_dict().get("loss_scale", 1.0) != 1.0

    def batches_to(self, steps: float) -> float:
        """Returns the fewest micro-batches in which ``steps`` steps can be made: the user decides which of them make one."""
        return steps

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs the user's ``training_step``; counts as one step if any optimizer stepped in it."""
        output = self._forward(batch, batch_idx)
        if self._not_stepped and not self._batch_complete:  # a backward, and an optimizer without a step
            self._accumulates = True
        self._not_stepped = set(self._parts.optimizers)
        self._batch_complete = True
        if self.stepped:
            # The user's optimizers have stepped: only the end of the step is launched, as self._optimizer is None.
            loss, self.loss = self.loss, None
            self._launch_update(loss)
            self._note_update()
        if not self._hooks.wants_outputs:
            return None
        return {} if output is None and self._shows_shares else self._detached(output)

    def backward(self, loss: Tensor, *args: Any, loss_id: int = 0, **options: Any) -> None:
        """Implements ``TrainingModule.manual_backward``."""
        self.loss = loss.detach()
        self._batch_complete = False
        hooks = self._hooks
        for hook in hooks.before_backward:
            hook(loss)
        run = partial(hooks.run_backward, *args) if args else hooks.run_backward
        self._parts.precision.backward(loss, loss_id, run, **options)
        for hook in hooks.after_backward:
            hook()

    def step(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """Implements ``step`` of an optimizer from ``TrainingModule.optimizers()``."""
        if closure is not None and demands_closure(optimizer):
            # Such an optimizer calls the closure itself, any number of times, and uses the gradients as the closure leaves them.
            self.stepped = True
            self._not_stepped.discard(optimizer)
            try:
                return optimizer.step(partial(self.counted_once, optimizer, closure))
            finally:
                self._parts.metrics.muted = False
        result = closure() if closure is not None else None
        if self._scales and self.loss is None and not self._accumulates:
            self._check_unscaled(optimizer)
        plan = self._plans.get(optimizer)
        if plan is None:
            plan = self._parts.precision.plan(optimizer, self._parts.strategy, None)
            self._plans[optimizer] = plan
        if self._hooks.before_step:
            plan.step_shown(partial(self._run_hooks, optimizer))
        else:
            plan.step(self._clips.pop(optimizer, None))
        self.stepped = True
        self._not_stepped.discard(optimizer)
        return result

    def _check_unscaled(self, optimizer: Optimizer) -> None:
        """Raises :class:`ConfigError` for gradients that were never multiplied by the loss scale, but would be divided by it."""
        precision = self._parts.precision
        if any(parameter.grad is not None for parameter in precision.gradients(optimizer).parameters):
            raise ConfigError(
                f"training_step left gradients without manual_backward: the step at precision {precision.name!r} would divide them "
                "by a loss scale that they do not have; write self.manual_backward(loss) in place of loss.backward()"
            )

    def _run_hooks(self, optimizer: Optimizer) -> Clip | None:
        """Runs the hooks before a step, one of which may ask for clipping."""
        for hook in self._hooks.before_step:
            hook(optimizer)
        return self._clips.pop(optimizer, None)

    def accumulation_state(self) -> StateDict | None:
        """Returns the accumulation's state if the user keeps gradients from one training_step to the next; else None."""
        if not self._accumulates or not self._batch_complete:
            return None
        loss = torch.zeros((), dtype=torch.float32, device="cpu") if self.loss is None else self.loss
        return self._accumulation_tensors().state(loss)

    def load_accumulation_state(self, state: StateDict) -> str:
        """Restores the result of :meth:`accumulation_state`; returns why that is impossible, or an empty string."""
        self._accumulates = True
        problem = super().load_accumulation_state(state)
        self.loss = None  # a step status shows the loss of the step's last backward, which has not run yet
        return problem

    def clip(self, optimizer: Optimizer, clip: Clip) -> None:
        """Implements ``TrainingModule.clip_gradients``: the next step clips, once gradients are averaged and unscaled."""
        if demands_closure(optimizer):
            clip_gradients(
                optimizer, clip
            )  # called in the closure, after backward: the step comes from within the optimizer
        else:
            self._clips[optimizer] = clip


class ClosureUpdate(Update):
    """LBFGS and similar: the optimizer calls forward and backward itself, any number of times per step."""

    def _use_weights(self) -> LossWeights:
        name = type(self._optimizer).__name__
        raise ConfigError(f"training_step returned (sum, weight), but {name} runs backward itself; return the mean")

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs the optimizer on one batch; ``self.log`` counts only the first forward."""
        self._check_optimizer()
        optimizer = cast("Optimizer", self._optimizer)
        outputs: list[Output] = []

        def forward_backward() -> Tensor:
            self.loss = None
            outputs.append(self._forward_backward(batch, batch_idx))
            loss = cast("Tensor | None", self.loss)
            if loss is None:
                name = type(optimizer).__name__
                raise ConfigError(f"training_step returned None, but {name} needs the loss of every forward; return it")
            if self.plan is not None and self.plan.memory is not None:
                write_gradients(optimizer, self._parts.strategy.reduce_gradients(self.plan.memory()))
            return loss

        def closure() -> Tensor:
            loss: Tensor = self.counted_once(optimizer, forward_backward)
            clip = self._parts.clip
            if self._hooks.clipping is not None:
                self._hooks.clipping(optimizer, clip)
            elif clip is not None:
                clip_gradients(optimizer, clip)
            return loss

        try:
            if self._hooks.step is not None:
                self._hooks.step(self._state.epoch, batch_idx, optimizer, closure)
            else:
                optimizer.step(closure)  # type: ignore[arg-type]  # the closure returns the loss tensor
        finally:
            self._parts.metrics.muted = False
        loss, self.loss = self.loss, None
        if self.overflow_policy is not None:
            self.overflow_policy.launch_close(loss)
        self._note_update()
        if not outputs:
            return None
        return outputs[-1] if self._shows_shares else outputs[0]
