"""Compares a replay bit by bit with an eager step from the same state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.shards import local, local_gradient
from fabricamp.ops.tensors import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import Output
    from fabricamp.engine.graph.host_effects import Generators
    from fabricamp.engine.update import LossWeights
    from fabricamp.gradients.memory import GradientMemory, Presence
    from fabricamp.metrics.replay import MetricCopies, MetricStates
    from fabricamp.precision.base import Precision
    from fabricamp.precision.step_results import StepResults

REPEATED_STEPS: Final = 8
"""The number of further eager steps that may show a kernel that is not deterministic.

Two steps with atomic sums often have the same bits: with flash attention's backward on an H200 one pair of a dozen had.
"""


def compare(
    state: ComparedState, before: StateCopies, eager: Callable[[], Output], everywhere: Callable[[bool], bool]
) -> str:
    """Returns the first difference between the replay that has run and an ``eager`` step from ``before``; empty for none.

    If eager steps differ from each other, too, the step's kernels are not deterministic; then no difference is reported.
    ``everywhere`` returns whether a flag is set on all ranks, so that all ranks run the same number of eager steps.  Afterwards the
    state is that after the replay, or ``before`` if the replay is wrong on any rank.
    """
    replayed = state.copy()
    state.put_back(before)
    eager()
    difference = state.difference(replayed)
    agreed = everywhere(not difference)
    if not agreed:
        first = state.copy()
        for _ in range(REPEATED_STEPS):
            state.put_back(before)
            eager()
            if difference and state.difference(first):
                difference = ""
            agreed = everywhere(not difference)
            if agreed:
                break
    if agreed:
        state.put_back(replayed)
        return ""
    state.put_back(before)
    return difference or "a value of another rank"


class ComparedState:
    """All that a step writes: weights, buffers, metric and optimizer states, loss scale, step status, the device's generators.

    With ``accumulates``, also the gradients of an accumulation in progress, in ``.grad`` or in ``memory``.  ``handed``: parameters
    whose ``.grad`` the step writes for an optimizer that steps after it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        device: torch.device,
        metric_states: MetricStates,
        generators: Generators,
        *,
        memory: GradientMemory | None = None,
        weights: LossWeights | None = None,
        accumulates: bool = False,
        handed: Sequence[Tensor] = (),
    ) -> None:
        tensors = dict(_named_tensors(module, optimizer, precision.verdicts))
        if weights is not None:
            tensors["the weight of the losses"] = weights.total
            tensors["the mean weight of the losses"] = weights.reference
        if memory is not None:
            tensors |= {f"sums of gradients {number}": sums for number, sums in enumerate(memory.tensors)}
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        self._tensors = {name: part for name, part in parts.items() if part.device == device}
        self._parameters = list(dict.fromkeys([*(module.parameters() if accumulates else ()), *handed]))
        self._precision = precision
        self._memory = memory
        self._metric_states = metric_states
        self._generators = generators
        self.copies_on = device
        """The device of the copies.  On the host they take no memory of the GPU, where a state may be as large as a step."""

    @property
    def bytes(self) -> int:
        """The number of bytes that a copy takes."""
        return sum(self._sizes())

    @property
    def largest_bytes(self) -> int:
        """The number of bytes of the largest tensor: a copy on the host is compared tensor by tensor on the device."""
        return max(self._sizes(), default=0)

    def _sizes(self) -> Iterator[int]:
        return (local(one).nbytes for one in (*self._tensors.values(), *self._parameters))

    def copy(self) -> StateCopies:
        """Returns copies of everything, on ``copies_on``; those of metric states and generators stay on their device."""
        return StateCopies(
            {name: self._copied(tensor) for name, tensor in self._tensors.items()},
            [
                (one, one.grad, None if one.grad is None else self._copied(local_gradient(one)))
                for one in self._parameters
            ],
            None if self._memory is None else self._memory.presence,
            self._metric_states.copy(),
            self._generators.states(),
        )

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.copies_on, copy=True)

    @torch.no_grad()
    def put_back(self, copies: StateCopies) -> None:
        """Restores the state from ``copies``."""
        for name, tensor in self._tensors.items():
            tensor.copy_(copies.tensors[name])
        # Masters were written with their weights: taken for an edit, they would be rounded again, within the graphs' memory.
        self._precision.note_restored_weights()
        for parameter, gradient, values in copies.gradients:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                local(gradient).copy_(values)
        if self._memory is not None and copies.presence is not None:
            self._memory.presence = copies.presence
        self._metric_states.put_back(copies.metrics)
        self._generators.put_back(copies.generators)

    def difference(self, copies: StateCopies) -> str:
        """Returns the name of the first tensor or generator that differs from ``copies`` in any bit; empty if none does."""
        for name, tensor in self._tensors.items():
            if not same_bits(tensor, copies.tensors[name]):
                return name
        for number, (parameter, _, values) in enumerate(copies.gradients):
            if (parameter.grad is None) != (values is None):
                return f"whether parameter {number} has a gradient"
            gradient = local_gradient(parameter)
            if gradient is not None and values is not None and not same_bits(gradient, values):
                return f"the gradient of parameter {number}"
        if changed := self._metric_states.difference(copies.metrics):
            return changed
        return "" if self._generators.are(copies.generators) else "the state of a random generator on the device"


class StateCopies(NamedTuple):
    """Copies of all that a step may write."""

    tensors: dict[str, Tensor]
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]]
    """(parameter, its ``.grad``, a copy of its ``.grad``) for each parameter."""
    presence: Presence | None
    metrics: MetricCopies
    generators: list[Tensor]


def _named_tensors(
    module: nn.Module, optimizer: Optimizer, verdicts: StepResults | None
) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), f"master {number}")
            yield name, parameter
            state = optimizer.state.get(parameter, {})
            yield from ((f"{key} of {name}", value) for key, value in state.items() if isinstance(value, Tensor))
            number += 1
    if verdicts is not None:
        yield from ((f"the loss scaler's {key}", tensor) for key, tensor in verdicts.scaler.tensors.items())
