"""Maps model parameters to master parameters for one optimizer, and holds the sums of its micro-batches' gradients."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import Gradients
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.shards import SharedRows, any_shard, local, local_gradient
from fabricamp.optimizers.parameters import owned_parameters
from fabricamp.precision.fused import flags_of
from fabricamp.precision.master_weights import MasterWeights, adopt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from fabricamp.precision.nonfinite_tracker import GradStatsRecord, NonFiniteTracker

_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


class Gradient(NamedTuple):
    """A gradient ``value`` with its model parameter (``holder``, filled by backward) and the ``target`` that is updated."""

    holder: Tensor
    target: Tensor
    value: Tensor


class ParamGradMap:
    """The model parameters and updated tensors of one optimizer, in the order of its ``param_groups``.

    ``holders`` are the model parameters; backward fills their ``.grad``.  ``targets`` are updated: the fp32 master of a half
    holder, else the holder itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        nonfinite_tracker: NonFiniteTracker,
        *,
        sums: bool,
        exchanged: bool,
    ) -> None:
        self.optimizer = optimizer
        self.nonfinite_tracker = nonfinite_tracker
        self.holders: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.seen: list[Tensor | None] | None = None
        self.stats_record: GradStatsRecord | None = None
        """The statistics of a launched step, until the host has recorded them."""
        self.found_inf: Tensor | None = None
        self.copies: list[Tensor | None] | None = None
        self.writes = False
        """Whether gradients of targets were written since the last :meth:`clear`."""
        self.apart: list[tuple[Tensor, Tensor]] = []
        """The (holder, target) pairs with gradients that a step clears: two tensors, or gradients summed in :attr:`memory`."""
        self._masters = masters
        self._exchanged = exchanged
        self._grad_of: Callable[[Any], Any] = _grad
        self._shared: SharedRows | None = None
        self.sums = sums
        """Whether :attr:`memory` sums the gradients of micro-batches; ``.grad`` then holds those of one micro-batch."""
        self.memory = GradientMemory((), sums=sums)
        self.refresh()

    def refresh(self) -> None:
        """Adds parameters from calls of ``add_param_group`` since the last step; keeps the sums so far."""
        groups = self.optimizer.param_groups
        current = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        if len(current) == len(self.targets) and all(map(operator.is_, current, self.targets)):
            return
        known = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        holders = [known.get(id(parameter), parameter) for parameter in current]
        if self._masters is not None:
            adopt(self._masters, self.optimizer)
        self.targets = owned_parameters(self.optimizer)
        self._shared = SharedRows.of(self.targets)
        self._grad_of = local_gradient if any_shard(self.targets) else _grad
        self.memory.hold(holders)
        self.holders = self.memory.parameters
        pairs = list(zip(holders, self.targets, strict=True))
        self.apart = [pair for pair in pairs if self.sums or pair[0] is not pair[1]]
        if self._masters is not None:
            self.copies = [None if holder is target else holder for holder, target in pairs]

    def collect(self, multiplier: Tensor) -> list[Tensor]:
        """Adds every holder's ``.grad``, times ``multiplier``, to its sum, and clears ``.grad``; returns the gradients added."""
        self.refresh()
        return self.memory.add(multiplier)

    def gather(self, gradients: Gradients) -> list[Gradient]:
        """Returns the accumulated gradients: those given, this process's sums, or each ``.grad``."""
        self.refresh()
        values = self._given(self._own_sums() if self.sums and gradients.tensors is None else gradients)
        return [
            Gradient(holder, target, value)
            for holder, target, value in zip(self.holders, self.targets, values, strict=True)
            if value is not None
        ]

    def own(self, gradients: list[Tensor]) -> list[Tensor]:
        """Returns the local shards of sharded gradients, else the gradients themselves."""
        return gradients if self._grad_of is _grad else [local(one) for one in gradients]

    def shared(self, targets: Sequence[Tensor]) -> SharedRows | None:
        """Returns which ranks hold the other shards of ``targets``, a subset of :attr:`targets`; None if nothing is sharded."""
        if self._shared is None or len(targets) == len(self.targets):
            return self._shared
        wanted = set(map(id, targets))
        return self._shared.chosen([place for place, one in enumerate(self.targets) if id(one) in wanted])

    def rows(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None]:
        """Returns one gradient (or None) per target, and device flags that mark the gradients to use (None: all).

        The same as :meth:`gather` without a wait, for optimizers that read the flags on the device.
        """
        self.refresh()
        if self.sums and gradients.tensors is None:
            gradients = self._own_sums()
        if gradients.tensors is None:
            return list(map(self._grad_of, self.holders)), None
        if gradients.present is None:
            return self._given(gradients), None
        return self._given(gradients._replace(present=None)), flags_of(gradients.present)

    def _own_sums(self) -> Gradients:
        """Returns this process's own sums; raises :class:`ConfigError` if they have to be exchanged first."""
        if self._exchanged:
            raise ConfigError(
                "the fp32 sums of an optimizer's gradients have to be exchanged before step: give it what "
                "strategy.reduce_gradients(precision.gradients(optimizer)) returns"
            )
        return self.memory.local()

    def _given(self, gradients: Gradients) -> Sequence[Tensor | None]:
        if gradients.tensors is None:
            return list(map(_grad, self.holders))
        if len(gradients.tensors) != len(self.holders):
            raise ConfigError(
                f"step got {len(gradients.tensors)} gradient tensors for {len(self.holders)} parameters; give one (or None) "
                "for each of precision.gradients(optimizer).parameters, in that order"
            )
        return gradients.values()

    def clear(self, *, sums: bool = True) -> None:
        """Drops the accumulated gradients, except ``.grad`` of parameters that backward fills and the optimizer updates itself.

        ``sums`` False keeps the sums, so nothing is launched.
        """
        self.seen = None
        if sums and self.sums:
            self.memory.clear()
        for holder, _ in self.apart:
            holder.grad = None
        if self.writes:
            self.writes = False
            for _, target in self.apart:
                target.grad = None

    def release(self) -> None:
        """Puts the module's own parameters back into the optimizer, with the optimizer state of their masters."""
        self.clear()
        original = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        for group in self.optimizer.param_groups:
            for index, target in enumerate(group["params"]):
                holder = original.get(id(target), target)
                if holder is not target:
                    group["params"][index] = holder
                    if target in self.optimizer.state:
                        self.optimizer.state[holder] = self.optimizer.state.pop(target)


def pair(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Creates ``target.grad`` in the target's dtype; returns (source values, destination values)."""
    _, target, value = gradient
    if value.is_sparse:
        value = value.coalesce()
        target.grad = torch.sparse_coo_tensor(
            value.indices(),
            value.values().to(target.dtype, copy=True),
            value.shape,
            dtype=target.dtype,
            device=value.device,
            is_coalesced=True,
            check_invariants=False,
        )
        return value.values(), target.grad.values()
    if value.dtype == target.dtype:
        target.grad = value
        return value, value
    target.grad = torch.empty_like(target)
    return value, target.grad


def values_of(gradient: Tensor | None) -> Tensor:
    """Returns the values of a dense or sparse gradient as a dense tensor."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient
