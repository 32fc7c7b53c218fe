"""What one optimizer updates: which tensor's gradient goes to which target, and where micro-batches are summed."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.precision.fused import flags_of
from fabricamp.precision.master_weights import adopt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from fabricamp.precision.blame import Blame
    from fabricamp.precision.master_weights import MasterWeights
    from fabricamp.strategies.base import Gradients

__all__ = ["Binding", "Gradient", "pair", "values_of"]

_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


class Gradient(NamedTuple):
    """A gradient on its way from the tensor that backward filled to the one that is updated."""

    holder: Tensor
    target: Tensor
    value: Tensor


class _Sums:
    """One fp32 (or fp64) flat buffer per dtype and device: a view a parameter, and behind them one flag a parameter.

    The flags travel with the sums, so that ranks whose backward reached different parameters update the same ones.
    """

    def __init__(self, holders: Sequence[Tensor]) -> None:
        self.flat: list[Tensor] = []
        self.views: list[Tensor] = [torch.empty(0)] * len(holders)
        self.flags: list[Tensor] = [torch.empty(0)] * len(holders)
        self.present = [False] * len(holders)
        self.filled = False
        """Whether anything was written since the last :meth:`clear`: here, or by other ranks into what is exchanged."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, holder in enumerate(holders):
            by_kind.setdefault((torch.promote_types(holder.dtype, torch.float32), holder.device), []).append(index)
        for (dtype, device), indices in by_kind.items():
            sizes = [holders[index].numel() for index in indices]
            flat = torch.zeros(sum(sizes) + len(indices), dtype=dtype, device=device)
            self.flat.append(flat)
            pieces = flat.split([*sizes, *([1] * len(indices))])
            for position, index in enumerate(indices):
                self.views[index] = pieces[position].view(holders[index].shape)
                self.flags[index] = pieces[len(indices) + position]
        self.all_views = tuple(self.views)  # always the same memory

    def clear(self) -> None:
        if self.filled:
            self.filled = False
            for flat in self.flat:
                flat.zero_()
            self.present = [False] * len(self.present)


class Binding:
    """The tensors of one optimizer, in the order of its ``param_groups``.

    ``holders`` get gradients from backward, ``targets`` are updated: fp32 masters for half holders, else the same tensor.
    """

    def __init__(
        self, optimizer: Optimizer, masters: MasterWeights | None, blame: Blame, *, sums: bool, exchanged: bool
    ) -> None:
        self.optimizer = optimizer
        self.blame = blame
        self.holders: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.flat: list[Tensor] = []
        self.seen: list[Tensor | None] | None = None
        self.found_inf: Tensor | None = None
        self.copies: list[Tensor | None] | None = None
        self.writes = False
        """Whether gradients of targets were written since the last :meth:`clear`."""
        self.apart: list[tuple[Tensor, Tensor]] = []
        """Holders and targets that are two tensors, or stand for one that is summed elsewhere: a step clears their gradients."""
        self._masters = masters
        self._exchanged = exchanged
        self._sums = _Sums([]) if sums else None
        self.refresh()

    def refresh(self) -> None:
        """Takes in parameters that came with ``add_param_group`` since; what is summed so far is kept."""
        groups = self.optimizer.param_groups
        current = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        if len(current) == len(self.targets) and all(map(operator.is_, current, self.targets)):
            return
        known = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        holders = [known.get(id(parameter), parameter) for parameter in current]
        if self._masters is not None:
            adopt(self._masters, self.optimizer)
        self.targets = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self._sums is not None:
            self._move_sums(holders)
        self.holders = holders
        pairs = list(zip(holders, self.targets, strict=True))
        self.apart = [pair for pair in pairs if self._sums is not None or pair[0] is not pair[1]]
        if self._masters is not None:
            self.copies = [None if holder is target else holder for holder, target in pairs]

    def _move_sums(self, holders: list[Tensor]) -> None:
        old, new = self._sums, _Sums(holders)
        assert old is not None
        positions = {id(holder): index for index, holder in enumerate(self.holders)}
        for index, holder in enumerate(holders):
            before = positions.get(id(holder))
            if before is not None:
                new.views[index].copy_(old.views[before])
                new.flags[index].copy_(old.flags[before])
                new.present[index] = old.present[before]
        new.filled = old.filled
        self._sums = new
        self.flat[:] = new.flat  # the same list: the loop holds it

    def collect_sums(self, multiplier: Tensor | None = None) -> list[Tensor]:
        """Adds every holder's ``.grad``, times ``multiplier``, to its sum, and clears it; returns the gradients added."""
        self.refresh()
        sums = self._sums
        assert sums is not None
        filled = [index for index, holder in enumerate(self.holders) if holder.grad is not None]
        gradients = [_dense(self.holders[index].grad) for index in filled]
        ops.accumulate(gradients, [sums.views[index] for index in filled], multiplier)
        sums.filled |= bool(filled)
        for index in filled:
            self.holders[index].grad = None
            if not sums.present[index]:
                sums.present[index] = True
                sums.flags[index].fill_(1)
        return gradients

    def take_sums(self) -> None:
        """Takes note of sums that were written from outside: their flags say which parameters they have."""
        if self._sums is not None and self._sums.flags:
            self._sums.filled = True
            self._sums.present = [flag != 0 for flag in torch.cat([flag.cpu() for flag in self._sums.flags]).tolist()]

    def gather(self, gradients: Gradients) -> list[Gradient]:
        """Returns the gradients of a window, from wherever they are."""
        self.refresh()
        values = self._summed(gradients) if self._sums is not None else self._given(gradients)
        return [
            Gradient(holder, target, value)
            for holder, target, value in zip(self.holders, self.targets, values, strict=True)
            if value is not None
        ]

    def rows(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None]:
        """Returns a gradient a target (or None), and the flags that say on the device which of them count (None: all).

        What :meth:`gather` tells too, without a wait: for optimizers that read the flags themselves.
        """
        self.refresh()
        if self._sums is not None:
            self._check_exchanged(gradients)
            sums = self._sums
            if gradients.tensors is None:
                present = all(sums.present)
                return sums.all_views if present else _where(sums.views, sums.present), None
            if all(flat.dtype is torch.float32 for flat in sums.flat):
                return sums.all_views, sums.flags
            return self._summed(gradients), None
        if gradients.tensors is None or gradients.present is None:
            return self._given(gradients), None
        return self._given(gradients._replace(present=None)), flags_of(gradients.present)

    def _summed(self, gradients: Gradients) -> list[Tensor | None]:
        sums = self._sums
        assert sums is not None
        self._check_exchanged(gradients)
        present: Sequence[bool] = sums.present
        if gradients.tensors is not None and not all(present):
            # Only a rank whose backward left parameters out has to ask what the others had.
            present = [bool(flag) for flag in torch.cat([flag.float() for flag in sums.flags]).tolist()]
        return _where(sums.views, present)

    def _check_exchanged(self, gradients: Gradients) -> None:
        given = gradients.tensors
        if given is not None and self._sums is not None:
            self._sums.filled = True
        in_place = (
            given is not None
            and len(given) == len(self.flat)
            and all(one is other for one, other in zip(given, self.flat, strict=True))
        )
        if not in_place and (self._exchanged or given is not None):
            raise ConfigError(
                "the fp32 sums of an optimizer's gradients have to be exchanged in place: call "
                "strategy.reduce_gradients(buffers=precision.accumulation_buffers(optimizer)) before step"
            )

    def _given(self, gradients: Gradients) -> Sequence[Tensor | None]:
        if gradients.tensors is None:
            return list(map(_grad, self.holders))
        if len(gradients.tensors) != len(self.holders):
            raise ConfigError(
                f"step got {len(gradients.tensors)} gradient tensors for {len(self.holders)} parameters; give one (or None) "
                "for each of precision.gradient_holders(optimizer), in that order"
            )
        return gradients.values()

    def clear(self) -> None:
        """Forgets the window's gradients, except where the optimizer's own ``.grad`` is what backward fills."""
        self.seen = None
        if self._sums is not None:
            self._sums.clear()
        for holder, _ in self.apart:
            holder.grad = None
        if self.writes:
            self.writes = False
            for _, target in self.apart:
                target.grad = None

    def release(self) -> None:
        """Gives the optimizer back the module's own parameters, with the state of their masters."""
        self.clear()
        original = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        for group in self.optimizer.param_groups:
            for index, target in enumerate(group["params"]):
                holder = original.get(id(target), target)
                if holder is not target:
                    group["params"][index] = holder
                    if target in self.optimizer.state:
                        self.optimizer.state[holder] = self.optimizer.state.pop(target)


def _where(values: Sequence[Tensor], here: Sequence[bool]) -> list[Tensor | None]:
    return [value if present else None for value, present in zip(values, here, strict=True)]


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def pair(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Where the values of a gradient are, and where they go: ``target.grad``, in the target's dtype."""
    _, target, value = gradient
    if value.is_sparse:
        value = value.coalesce()
        target.grad = torch.sparse_coo_tensor(
            value.indices(),
            value.values().to(target.dtype, copy=True),
            value.shape,
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
    """Returns the numbers of a gradient, of a sparse one too."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient
