"""Compares a replay bit by bit with an eager step from the same state.

:class:`ReplayCheck` runs a replay of training and compares it; :func:`compare` decides, over a :class:`ComparedState`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.engine.graph.memory_budget import free_host_memory
from fabricamp.errors import NotCapturableError
from fabricamp.ops.shards import local, local_gradient
from fabricamp.ops.tensors import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch
    from fabricamp.engine.graph.batches import Key
    from fabricamp.engine.graph.cache import GraphCache
    from fabricamp.engine.graph.capture import StepCapture
    from fabricamp.engine.graph.capture_consensus import CaptureConsensus
    from fabricamp.engine.graph.captured import CapturedStep
    from fabricamp.engine.graph.host_effects import Generators
    from fabricamp.engine.graph.memory_budget import GraphMemoryBudget
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import LossWeights, Update
    from fabricamp.gradients.memory import GradientMemory, Presence
    from fabricamp.metrics.replay import MetricCopies, MetricStates
    from fabricamp.precision.base import Precision
    from fabricamp.precision.step_results import StepResults

_LOG = logging.getLogger("fabricamp")

REPEATED_STEPS: Final = 8
"""The number of further eager steps that may show a kernel that is not deterministic.

Two steps with atomic sums often have the same bits: with flash attention's backward on an H200 one pair of a dozen had.
"""


class ReplayCheck:
    """Runs replays of training and compares them with eager steps, on all ranks or on none."""

    def __init__(
        self,
        parts: FitParts,
        eager: Update,
        graphs: GraphCache,
        capture: StepCapture,
        memory_budget: GraphMemoryBudget,
        consensus: CaptureConsensus,
    ) -> None:
        self._parts = parts
        self._eager = eager
        self._graphs = graphs
        self._capture = capture
        self._memory_budget = memory_budget
        self._consensus = consensus

    def launch(
        self, step: CapturedStep, batch: Batch, run_eagerly: Callable[[], object], key: Key
    ) -> NotCapturableError | None:
        """Runs a replay and compares it to an eager step bit by bit, if the memory suffices for that.

        ``run_eagerly`` launches what the graph holds.  Returns None, or an error that names the first difference; the state is as
        before the replay then.
        """
        metrics = self._parts.metrics
        role = key[1]
        state = ComparedState(
            self._parts.module,
            self._parts.optimizers[0],
            self._parts.precision,
            self._graphs.stream.device,
            step.metric_states,
            step.generators,
            memory=self._eager.summing_memory(),
            weights=self._eager.weights,
            written=step.written,
            accumulates=role.accumulate > 1,
            handed=[parameter for parameter, _ in step.launched.handed],
        )
        if not self._consensus.all(self._has_memory(state, key)):
            _LOG.warning("the replay is not compared with an eager step: there is no memory for one")
            step.launch(batch)
            return None
        step.restore_gradients()
        logged = step.log_replay.table.bank.clone()
        before = state.copy()
        step.launch(batch)
        muted = metrics.muted
        metrics.muted = True
        try:
            difference = compare(state, before, run_eagerly, self._consensus.all)
        finally:
            metrics.muted = muted
        if not difference:
            step.show_gradients()
            return None
        step.log_replay.table.bank.copy_(logged)
        return NotCapturableError(f"a replay differs bitwise from an eager step, first in {difference}")

    def _has_memory(self, state: ComparedState, key: Key) -> bool:
        """Whether there is memory for an eager step and the copies of ``state``, which are kept on the host if they fit there."""
        role = key[1]
        # In the graphs' memory an eager step takes no more than the gradients that the graph keeps there.
        needed = self._capture.kept_bytes(role) if self._graphs.lends_to(role) else self._memory_budget.eager_bytes(key)
        # Up to three copies: before the replay, after it, and after a first eager step.
        copies = 3 * state.bytes
        if copies <= free_host_memory() // self._parts.strategy.environment.local_world_size:
            state.copies_on = torch.device("cpu")
            needed += state.largest_bytes
        else:
            needed += copies
        return self._memory_budget.has_free(needed)


def compare(
    state: ComparedState, before: StateCopies, eager: Callable[[], object], everywhere: Callable[[bool], bool]
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

    ``written``: other tensors that it writes to, by name.  With ``accumulates``, also the gradients of an accumulation in progress,
    in ``.grad`` or in ``memory``.  ``handed``: parameters whose ``.grad`` the step writes for an optimizer that steps after it.
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
        written: Mapping[str, Tensor] | None = None,
        memory: GradientMemory | None = None,
        weights: LossWeights | None = None,
        accumulates: bool = False,
        handed: Sequence[Tensor] = (),
    ) -> None:
        tensors = {**(written or {}), **dict(_named_tensors(module, optimizer, precision.verdicts))}
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
