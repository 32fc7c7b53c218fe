"""The state that a comparison of a replay with eager steps looks at, copies and puts back: all that a step may write.

A :class:`ComparedState` makes :class:`StateCopies`, from which it is put back, and :class:`StateDigests`, which are enough to tell
whether two states have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import NotCapturableError
from fabricamp.ops.digests import digests
from fabricamp.ops.layouts import is_dense
from fabricamp.ops.shards import local, local_gradient
from fabricamp.ops.tensors import differing, same_bits
from fabricamp.optimizers import FusedOptimizer
from fabricamp.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.engine.graph.host_effects import Generators
    from fabricamp.engine.update import LossWeights
    from fabricamp.gradients.memory import GradientMemory, Presence
    from fabricamp.metrics.replay import MetricCopies, MetricStates
    from fabricamp.precision.base import Precision
    from fabricamp.precision.step_results import StepResults

_ALIGNMENT: Final = 16
_MOST_ELSEWHERE: Final = 2**26
"""Bytes of tensors on other devices, such as the host, up to which their bits are compared; of more, torch's counts of writes."""


class ComparedState:
    """All that a step writes: weights, buffers, metric and optimizer states, loss scale, step status, the device's generators.

    ``written``: other tensors that it writes to, by name.  With ``accumulates``, also the gradients of an accumulation in progress,
    in ``.grad`` or in ``memory``.  ``handed``: parameters whose ``.grad`` the step writes for an optimizer that steps after it.
    Tensors on other devices than ``device``, such as the host, are compared too: a replay cannot write them as an eager step does.

    Raises :class:`NotCapturableError` for a tensor that has no bytes to compare.
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
        updated = dict(_updated_tensors(module, optimizer))
        tensors = {**(written or {}), **updated, **dict(_other_tensors(module, precision.verdicts))}
        if weights is not None:
            tensors["the weight of the losses"] = weights.total
            tensors["the mean weight of the losses"] = weights.reference
        if memory is not None:
            tensors |= {f"sums of gradients {number}": sums for number, sums in enumerate(memory.tensors)}
        parts = _parts_of(tensors)
        self._updated = [name for name, part in _parts_of(updated).items() if part.device == device]
        self._left_out: frozenset[str] = frozenset()
        self._tensors = {name: part for name, part in parts.items() if part.device == device}
        self._elsewhere = {name: part for name, part in parts.items() if part.device != device}
        self._counts_writes = sum(part.nbytes for part in self._elsewhere.values()) > _MOST_ELSEWHERE
        self.parameters = list(dict.fromkeys([*(module.parameters() if accumulates else ()), *handed]))
        """The parameters whose ``.grad`` is a part of the state."""
        self._device = device
        self._precision = precision
        self._memory = memory
        self._metric_states = metric_states
        self._generators = generators

    @property
    def bytes(self) -> int:
        """The number of bytes that a copy takes on the device; those of metric states and generators are not counted."""
        tensors = [tensor for name, tensor in self._tensors.items() if name not in self._left_out]
        gradients = [local(one) if one.grad is None else local_gradient(one) for one in self.parameters]
        return sum(map(_room, [*tensors, *gradients]))

    def bytes_with(self, updated: Iterable[Tensor]) -> int:
        """Returns the bytes of a copy that has only these of weights and optimizer state."""
        self.leave_out(but=updated)
        try:
            return self.bytes
        finally:
            self._left_out = frozenset()

    @property
    def sample(self) -> Tensor | None:
        """The largest tensor on the device; None if there is none."""
        return max(self._tensors.values(), key=lambda one: one.nbytes, default=None)

    def _present(self) -> dict[str, Tensor]:
        """Returns the tensors on the device by name, with the gradients that there are now."""
        gradients = {
            name: part
            for number, one in enumerate(self.parameters)
            if (gradient := local_gradient(one)) is not None
            for name, part in _plain(f"the gradient of parameter {number}", gradient)
        }
        return {**self._tensors, **gradients}

    # -- parts, where a copy of all does not fit into memory -----------------------------------------------------------------------

    def leave_out(self, *, but: Iterable[Tensor]) -> None:
        """Leaves weights and optimizer state but these out of copies from here on; digests and differences know all of them."""
        kept = {one.data_ptr() for one in but}
        self._left_out = frozenset(name for name in self._updated if self._tensors[name].data_ptr() not in kept)

    def updated_digests(self) -> Tensor:
        """Returns digests of weights and optimizer state."""
        return digests([self._tensors[name] for name in self._updated])

    def updated_since(self, earlier: Tensor) -> str:
        """Returns the name of the first of these tensors that is not as in ``earlier``; empty if all are.  Waits for the device."""
        flags = (self.updated_digests() != earlier).any(1).tolist()
        return next((name for name, flag in zip(self._updated, flags, strict=True) if flag), "")

    # -- copies --------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, allocate: Callable[[int], Tensor]) -> StateCopies:
        """Returns copies of everything: of what is on the device in memory from ``allocate``, which gets a number of bytes."""
        tensors = {name: tensor for name, tensor in self._present().items() if name not in self._left_out}
        flat = allocate(sum(map(_room, tensors.values())))
        copies = {}
        begin = 0
        for name, tensor in tensors.items():
            copies[name] = _laid_out(flat[begin : begin + tensor.nbytes], tensor)
            begin += _room(tensor)
        if tensors:
            torch._foreach_copy_(list(copies.values()), list(tensors.values()))
        return StateCopies(copies, [(one, one.grad) for one in self.parameters], self._copies_beside())

    def _copies_beside(self) -> CopiesBeside:
        """Returns copies of what is not on the device, or small."""
        return CopiesBeside(
            {} if self._counts_writes else {name: tensor.clone() for name, tensor in self._elsewhere.items()},
            list(map(_version, self._elsewhere.values())),
            None if self._memory is None else self._memory.presence,
            self._metric_states.copy(),
            self._generators.states(),
        )

    @torch.no_grad()
    def put_back(self, copies: StateCopies) -> None:
        """Restores the state from ``copies``."""
        for parameter, gradient in copies.gradients:
            parameter.grad = gradient
        tensors = self._present()
        if copies.tensors:
            torch._foreach_copy_([tensors[name] for name in copies.tensors], list(copies.tensors.values()))
        # Masters were written with their weights: taken for an edit, they would be rounded again, within the graphs' memory.
        self._precision.note_restored_weights()
        beside = copies.beside
        for name, value in beside.elsewhere.items():
            self._elsewhere[name].copy_(value)
        if self._memory is not None and beside.presence is not None:
            self._memory.presence = beside.presence
        self._metric_states.put_back(beside.metrics)
        self._generators.put_back(beside.generators)

    # -- comparisons ---------------------------------------------------------------------------------------------------------------

    def digests(self) -> StateDigests:
        """Returns digests of what is on the device, and copies of the rest; waits for nothing on the device."""
        tensors = self._present()
        return StateDigests(list(tensors), digests(list(tensors.values())), self._copies_beside())

    def difference(self, earlier: StateCopies | StateDigests) -> str:
        """Returns the name of the first tensor or generator that differs from ``earlier`` in any bit; empty if none does.

        Waits for the device.
        """
        tensors = self._present()
        known = list(earlier.tensors)
        if list(tensors) != known:
            name = next(name for name in [*tensors, *known] if (name in tensors) != (name in known))
            return name.replace("the gradient of parameter", "whether there is a gradient of parameter")
        values = list(tensors.values())
        if isinstance(earlier, StateCopies):
            flags = differing(values, list(earlier.tensors.values()))
        else:
            flags = (digests(values) != earlier.sums).any(1).tolist()
        changed = next((name for name, flag in zip(tensors, flags, strict=True) if flag), "")
        return changed or self._difference_beside(earlier.beside)

    def _difference_beside(self, beside: CopiesBeside) -> str:
        for (name, tensor), version in zip(self._elsewhere.items(), beside.versions, strict=True):
            same = _version(tensor) == version if self._counts_writes else same_bits(tensor, beside.elsewhere[name])
            if not same:
                return f"{name}, which is on {tensor.device}"
        if changed := self._metric_states.difference(beside.metrics):
            return changed
        return "" if self._generators.are(beside.generators) else "the state of a random generator on the device"


class CopiesBeside(NamedTuple):
    """Copies of what is small, or not on the device."""

    elsewhere: dict[str, Tensor]
    versions: list[int]
    """Torch's counts of the writes to the tensors on other devices."""
    presence: Presence | None
    metrics: MetricCopies
    generators: list[Tensor]


class StateCopies(NamedTuple):
    """Copies of all that a step may write."""

    tensors: dict[str, Tensor]
    gradients: list[tuple[Tensor, Tensor | None]]
    """Each parameter and its ``.grad``, whose values are among ``tensors``."""
    beside: CopiesBeside


class StateDigests(NamedTuple):
    """What tells whether two states have the same bits: names, the digest of each tensor, and copies of the rest."""

    tensors: list[str]
    sums: Tensor
    beside: CopiesBeside


def _updated_tensors(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yields weights and optimizer state by name."""
    yield from module.named_parameters()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), f"master {number}")
            yield name, parameter
            state = optimizer.state.get(parameter, {})
            yield from ((f"{key} of {name}", value) for key, value in state.items() if isinstance(value, Tensor))
            if isinstance(optimizer, FusedOptimizer) and parameter in optimizer.remainders:
                yield f"remainder of {name}", optimizer.remainders[parameter]
            number += 1


def _other_tensors(module: nn.Module, verdicts: StepResults | None) -> Iterator[tuple[str, Tensor]]:
    """Yields buffers and the state of the loss scaler by name."""
    yield from module.named_buffers()
    if verdicts is not None:
        yield from ((f"the loss scaler's {key}", tensor) for key, tensor in verdicts.scaler.tensors.items())


def _parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(part for name, tensor in tensors.items() for part in _plain(name, tensor))


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors of which ``tensor`` consists, by name: this rank's shard, or the parts of a wrapper."""
    tensor = local(tensor)
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for part in wrapper.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(wrapper, part))
    elif tensor.layout is not torch.strided:
        raise NotCapturableError(
            f"{name} has the layout {tensor.layout}, and a replay is compared by the bytes of what it writes; keep it dense, or "
            "give CudaGraph(compare=False)"
        )
    elif tensor.device.type != "meta":  # which has no values
        yield name, tensor.conj() if tensor.is_conj() else tensor  # as it is in memory


def _room(tensor: Tensor) -> int:
    """Returns the bytes for a copy, up to the next one's address."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _laid_out(memory: Tensor, tensor: Tensor) -> Tensor:
    """Returns ``memory`` as a tensor like ``tensor``, with the same strides if this has no gaps in memory."""
    like = memory.view(tensor.dtype)
    return like.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else like.view(tensor.shape)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
