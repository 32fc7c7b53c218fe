"""Other ways to make an update: in the user's training_step (manual optimization), or by an optimizer that calls the forward."""

from __future__ import annotations

import contextlib
import operator
import weakref
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from fabricamp.engine.update import Update
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.ops.shards import local_gradient
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.closures import demands_closure, takes_closure
from fabricamp.precision.base import Clip
from fabricamp.precision.torch_updates import StepClosure, clip_gradients, write_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch, Closure, Output, StateDict
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import LossWeights
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.optimizer_step import OptimizerStep


_grad: Final = operator.attrgetter("grad")
_version: Final = operator.attrgetter("_version")
_UNSCALED: Final = -1
_NOTHING: Final = contextlib.nullcontext()


class ManualUpdate(Update):
    """Manual optimization: ``training_step`` calls ``manual_backward``, and ``step`` of what ``optimizers()`` returned."""

    def __init__(self, parts: FitParts) -> None:
        super().__init__(parts)
        self._clips: dict[Optimizer, Clip] = {}
        self._demand_closures = {optimizer for optimizer in parts.optimizers if demands_closure(optimizer)}
        self._steps = dict(zip(parts.optimizers, parts.optimizer_steps, strict=True))
        for step in parts.optimizer_steps:
            step.hands_over = True  # no wrapper has seen a backward
        self._not_stepped = set(parts.optimizers)
        self._accumulates = False  # whether a training_step has ended with gradients that no step used
        self._scales = parts.precision.state_dict().get("loss_scale", 1.0) != 1.0
        step_results = parts.precision.verdicts
        self._scale_moves = step_results is not None and step_results.scale_moves
        self._gradient_scales = GradientScales(getattr(step_results, "scale_change_since", lambda _: None))
        # A constant scale differs only from that of gradients which a step has unscaled.
        self._memories = list(map(parts.precision.gradients, parts.optimizers)) if self._scale_moves else []

    def batches_to(self, steps: float) -> float:
        """Returns the fewest micro-batches in which ``steps`` steps can be made: the user decides which of them make one."""
        return steps

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs the user's ``training_step``; counts as one step if any optimizer stepped in it."""
        output = self._forward(batch, batch_idx)
        if self._not_stepped and not self._batch_complete:  # a backward, and an optimizer without a step
            self._accumulates = True
        self._batch_complete = True
        if self.stepped:
            self.end_step()
        self._not_stepped = set(self._parts.optimizers)
        if not self._hooks.wants_outputs:
            return None
        return {} if output is None and self._shows_shares else self._detached(output)

    def end_step(self) -> None:
        """Ends a step after the last of its optimizers: moves the loss scale, counts the step."""
        if self._scale_moves:
            for optimizer in self._not_stepped:
                self._parts.precision.gradients(optimizer)  # takes in parameters that were added to it, as a step does
            self._gradient_scales.move(self._memories)
        # The user's optimizers have stepped: only the end of the step is launched, as self._optimizer is None.
        loss, self.loss = self.loss, None
        self.launch_update(loss)
        self._count_update()

    def backward(self, loss: Tensor, *args: Any, loss_id: int = 0, **options: Any) -> None:
        """Implements ``TrainingModule.manual_backward``."""
        self.loss = loss.detach()
        self._batch_complete = False
        hooks = self._hooks
        for hook in hooks.before_backward:
            hook(loss)
        run = partial(hooks.run_backward, *args) if args else hooks.run_backward
        with self._gradient_scales.adding(loss) if self._gradient_scales.may_differ else _NOTHING:
            self._parts.precision.backward(loss, loss_id, run, **options)
        if self._scale_moves:
            self._gradient_scales.note(self._memories)
        for hook in hooks.after_backward:
            hook()

    def step(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """Implements ``step`` of an optimizer from ``TrainingModule.optimizers()``."""
        if closure is not None and optimizer in self._demand_closures:
            # Such an optimizer calls the closure itself, any number of times, and uses the gradients as the closure leaves them.
            self.stepped = True
            self._not_stepped.discard(optimizer)
            try:
                return optimizer.step(partial(self._counted_once, optimizer, closure))
            finally:
                self._parts.metrics.muted = False
        result = closure() if closure is not None else None
        if self._scales and self.loss is None and not self._accumulates:
            self._check_unscaled(optimizer)
        if self._gradient_scales.may_differ:
            self._check_scale(optimizer)
        if self._state.global_step >= self._next_look:
            self.take_edits()
        step = self._steps[optimizer]
        if closure is not None and takes_closure(optimizer):
            self._step_with_closure(step, closure, result)
        else:
            self._launch_step(step)
        writes = not isinstance(optimizer, FusedOptimizer) or optimizer.leaves_gradients
        if self._scales and (self._hooks.before_step or writes):
            # The step has unscaled them where they are, in .grad.
            self._gradient_scales.note([self._parts.precision.gradients(optimizer)], unscaled=True)
        self.stepped = True
        self._not_stepped.discard(optimizer)
        return result

    def _counted_once(self, optimizer: Optimizer, closure: Closure) -> Any:
        """Runs one of the forwards that the optimizer calls in a step; ``self.log`` counts only the first one of a step.

        In a program written for Lightning it counts all of them, as there: a step's value is that of the last one.
        """
        torch.clear_autocast_cache()  # within a training_step it would keep half copies of the weights from before
        result = closure()
        self._parts.metrics.muted = not self._last_call_counts
        for hook in self._hooks.before_step:
            hook(optimizer)
        return result

    def _launch_step(self, step: OptimizerStep) -> None:
        """Launches the update of one optimizer; the training step ends later."""
        if self._hooks.before_step:
            step.run_shown(None, partial(self._run_hooks, step.optimizer))
        else:
            step.clip = self._clips.pop(step.optimizer, None)
            step.run(None)
        step.after()

    def _step_with_closure(self, step: OptimizerStep, closure: Closure, result: Any) -> None:
        """Steps an optimizer that may call ``closure`` again, which has run once and returned ``result``."""
        again = StepClosure(step.optimizer, partial(self._run_closure, step, closure), self._obstacle_to_second_pass())
        again.loss = result
        step.call = again.step
        try:
            self._launch_step(step)
        finally:
            step.call = None
            self._parts.metrics.muted = False

    @torch.enable_grad()
    def _run_closure(self, step: OptimizerStep, closure: Closure) -> Any:
        """Runs the user's ``closure`` once more in a step, then exchange, hooks and clipping."""
        optimizer = step.optimizer
        self._parts.metrics.muted = not self._last_call_counts
        # The step is outside of the precision's forward, which the closure has been in before.
        result = self._parts.precision.forward(partial(self._counted_once, optimizer, closure))
        gradients = step.exchange()
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)
        clip = self._clips.pop(optimizer, None)
        if clip is not None:
            clip_gradients(optimizer, clip)
        return result

    def _check_unscaled(self, optimizer: Optimizer) -> None:
        """Raises :class:`ConfigError` for gradients that were never multiplied by the loss scale, but would be divided by it."""
        precision = self._parts.precision
        if any(parameter.grad is not None for parameter in precision.gradients(optimizer).parameters):
            raise ConfigError(
                f"training_step left gradients without manual_backward: the step at precision {precision.name!r} would divide them "
                "by a loss scale that they do not have; write self.manual_backward(loss) in place of loss.backward()"
            )

    def _check_scale(self, optimizer: Optimizer) -> None:
        """Raises :class:`ConfigError` for gradients that have another scale than the one that the step would take out."""
        precision = self._parts.precision
        parameter = self._gradient_scales.other_scale(precision.gradients(optimizer).parameters)
        if parameter is None:
            return
        names = {id(one): name for name, one in self._parts.module.named_parameters()}
        name = precision.name
        cure = "clear gradients after their step (zero_grad)"
        if self._scale_moves:
            cure = (
                "clear them before the next backward (zero_grad), or step all optimizers that keep gradients in the same "
                f"training_step; or give a constant scale (OptLevel({name!r}, loss_scale=128.0)), each loss a loss_id "
                f"(OptLevel({name!r}, num_losses=2)), or bf16 ('O4', 'O5')"
            )
        raise ConfigError(
            f"{type(optimizer).__name__} would step with gradients of which not all have the loss scale of now (precision "
            f"{name!r}): those of {names.get(id(parameter), 'a parameter')!r}, all or in part, are from before another step, after "
            f"which the scale may differ; {cure}"
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
        return {
            **self._accumulation_tensors().state(loss),
            "other_scale": self._gradient_scales.state(self._parts.module),
        }

    def load_accumulation_state(self, state: StateDict) -> str:
        """Restores the result of :meth:`accumulation_state`; returns why that is impossible, or an empty string."""
        self._accumulates = True
        problem = super().load_accumulation_state(state)
        self.loss = None  # a step status shows the loss of the step's last backward, which has not run yet
        return problem

    def note_restored_gradients(self, state: StateDict) -> None:
        """Restores which of the gradients, now back in ``.grad``, have another loss scale."""
        self._gradient_scales.load_state(self._parts.module, state.get("other_scale", []))

    def clip(self, optimizer: Optimizer, clip: Clip) -> None:
        """Implements ``TrainingModule.clip_gradients``: the next step clips, once gradients are averaged and unscaled."""
        if optimizer in self._demand_closures:
            # Called in the closure, after backward: the step comes from within the optimizer.
            clip_gradients(optimizer, clip)
        else:
            self._clips[optimizer] = clip


class GradientScales:
    """Which gradients in ``.grad`` have another loss scale than the next step takes out, all of it or in part of a sum.

    The host knows scales by number: the scale moves at the end of a training_step, which :meth:`move` is told.  A gradient that was
    replaced or written in between (a ``zero_grad`` of either kind) is a new one.

    Where that is exact, gradients that are kept get the new scale: fp32 ones, if the scale changes by powers of two.
    ``change_since`` returns the scale of now divided by that of so many scales ago, on the device; None if it is not exact.
    """

    def __init__(self, change_since: Callable[[int], Tensor | None]) -> None:
        self._change_since = change_since
        self.may_differ = False
        """Whether gradients are left that may have another scale; if not, neither a backward nor a step has anything to ask."""
        self._number = 0
        """The number of the scale that a backward now gives its gradients."""
        self._notes: dict[GradientMemory, _Note] = {}
        self._others: dict[Tensor, _Seen] = {}
        """The gradients with another scale, by parameter."""

    def note(self, memories: Sequence[GradientMemory], *, unscaled: bool = False) -> None:
        """Notes the gradients of ``memories``: as backward has left them, or ``unscaled`` in place by a step."""
        for memory in memories:
            parameters = memory.parameters
            gradients = list(map(_grad, parameters))
            if not all(map(operator.is_not, gradients, repeat(None))):
                parameters = [parameter for parameter in parameters if parameter.grad is not None]
                gradients = list(map(_grad, parameters))
            # Weakly held, as zero_grad has to free their memory.
            references = list(map(weakref.ref, gradients))
            number = _UNSCALED if unscaled else self._number
            self._notes[memory] = _Note(
                memory.parameters, parameters, references, list(map(_version, gradients)), number
            )
            self.may_differ |= unscaled and bool(parameters)

    def move(self, memories: Sequence[GradientMemory]) -> None:
        """Notes that the scale may move now; the gradients of ``memories``, all there are, are left with that of before."""
        for memory in memories:
            note = self._notes.get(memory)
            if note is None or (note.number == self._number and note.of is not memory.parameters):
                self.note([memory])  # gradients that were restored, or of parameters that were added since the backward
        self._number += 1
        for memory, note in list(self._notes.items()):
            if all(map(operator.is_, map(_grad, note.parameters), repeat(None))):
                del self._notes[memory]
        self.may_differ = bool(self._notes or self._others)

    def other_scale(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Returns the first of ``parameters`` whose gradient has another scale; None if there is none."""
        self._settle()
        return next(filter(self._others.__contains__, parameters), None) if self._others else None

    @contextlib.contextmanager
    def adding(self, loss: Tensor) -> Iterator[None]:
        """Returns a context for the backward of ``loss``, to be entered if scales may differ.

        What backward adds to a gradient with another scale has no scale of its own any more.
        """
        self._settle()
        # Once more when gradients begin to flow: a ``backward`` that the module overrides may clear gradients first.
        handle = loss.register_hook(lambda _: self._settle()) if self._others and loss.requires_grad else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
        gradients = {parameter: parameter.grad for parameter in self._others}
        self._others = {each: _Seen.of(gradient) for each, gradient in gradients.items() if gradient is not None}
        self.may_differ = bool(self._others)

    def _settle(self) -> None:
        """Drops what was replaced or written since it was noted; of the rest, finds or rescales gradients with another scale."""
        if self._others:
            self._others = {each: seen for each, seen in self._others.items() if seen.is_still(each.grad)}
        for memory, note in list(self._notes.items()):
            if note.number == self._number:
                continue
            del self._notes[memory]
            if all(map(operator.is_, map(_grad, note.parameters), repeat(None))):
                continue
            kept: dict[Tensor, _Seen] = {}
            for parameter, gradient, version in zip(note.parameters, note.gradients, note.versions, strict=True):
                seen = _Seen(gradient, version)
                if seen.is_still(parameter.grad) and parameter not in self._others:
                    kept[parameter] = seen
            if kept and not self._rescale(list(kept), note.number):
                self._others.update(kept)
        self.may_differ = bool(self._others)

    @torch.no_grad()
    def _rescale(self, parameters: list[Tensor], number: int) -> bool:
        """Gives the gradients of ``parameters``, whose scale has this ``number``, that of now; returns whether that is exact."""
        gradients = [gradient for gradient in map(local_gradient, parameters) if gradient is not None]
        exact = all(gradient.dtype is torch.float32 and not gradient.is_sparse for gradient in gradients)
        if number == _UNSCALED or not exact:
            return False
        factor = self._change_since(self._number - number)
        if factor is None:
            return False
        torch._foreach_mul_(gradients, factor)
        return True

    def state(self, module: nn.Module) -> list[str]:
        """Returns the names of the parameters whose gradients have another scale."""
        self._settle()
        return [name for name, parameter in module.named_parameters() if parameter in self._others]

    def load_state(self, module: nn.Module, names: Sequence[str]) -> None:
        """Restores the result of :meth:`state`, once the gradients are in ``.grad``; others have the scale of now."""
        self._notes.clear()
        for name, parameter in module.named_parameters():
            if name in names and parameter.grad is not None:
                self._others[parameter] = _Seen.of(parameter.grad)
        self.may_differ = bool(self._others)


class _Seen(NamedTuple):
    """A gradient as it was."""

    gradient: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, gradient: Tensor) -> _Seen:
        return cls(weakref.ref(gradient), gradient._version)

    def is_still(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self.gradient() is gradient and gradient._version == self.version


class _Note(NamedTuple):
    """Gradients as they were, in lists that are filled without a loop, and the ``number`` of their scale.

    ``of``: the parameters that their memory had, among them those without a gradient.
    """

    of: list[Tensor]
    parameters: list[Tensor]
    gradients: list[weakref.ref[Tensor]]
    versions: list[int]
    number: int


class ClosureUpdate(Update):
    """LBFGS and similar: the optimizer calls forward and backward itself, any number of times per step."""

    def _use_weights(self) -> LossWeights:
        name = type(self._optimizer).__name__
        raise ConfigError(f"training_step returned (sum, weight), but {name} runs backward itself; return the mean")

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs the optimizer on one batch; ``self.log`` counts only the first forward."""
        self.check_optimizer()
        optimizer = cast("Optimizer", self._optimizer)
        outputs: list[Output] = []
        loss: Tensor | None = None

        def closure() -> Tensor:
            nonlocal loss
            output, loss = self._pass_for_closure(batch, batch_idx)
            outputs.append(output)
            return loss

        try:
            if self._hooks.step is not None:
                self._hooks.step(self._state.epoch, batch_idx, optimizer, closure)
            else:
                optimizer.step(closure)  # type: ignore[arg-type]  # the closure returns the loss tensor
        finally:
            self._parts.metrics.muted = False
        if self.overflow_policy is not None:
            self.overflow_policy.launch_end(loss)
        self._count_update()
        if not outputs:
            return None
        return outputs[-1] if self._last_call_counts else outputs[0]
