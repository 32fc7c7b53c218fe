"""Gradient accumulation: the accumulated gradients of one optimizer, in ``.grad`` or summed in flat memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import NotCapturableError
from fabricamp.gradients.buckets import RankSums
from fabricamp.gradients.flat import IN_PLACE, FlatGradients, Gradients, Transport
from fabricamp.ops.layouts import may_be_lazy
from fabricamp.ops.uploads import is_capturing

_grad: Final = operator.attrgetter("grad")
_is_sparse: Final = operator.attrgetter("is_sparse")
_NONE: Final[Mapping[int, Tensor]] = MappingProxyType({})


class Presence(NamedTuple):
    """Whether the sums have to be cleared (``filled``), and one bool per parameter: it has a gradient in the sums."""

    filled: bool
    parameters: tuple[bool, ...]


class GradientMemory:
    """The gradients of ``parameters``: autograd sums them in each ``.grad``, or with ``sums`` :meth:`add` sums them in fp32.

    A Precision makes one memory per optimizer, and a Strategy exchanges it.  With ``keeps_sparse``, a sum of sparse gradients alone
    is sparse too, until it is exchanged; else they are added to the flat sums.
    """

    def __init__(self, parameters: Sequence[Tensor], *, sums: bool = False, keeps_sparse: bool = False) -> None:
        self.parameters = list(parameters)
        self.flat = _flat_sums(self.parameters) if sums else None
        """The flat sums (fp32; fp64 for fp64 parameters), followed by one flag per parameter; None without ``sums``."""
        self.sparse: dict[int, Tensor] = {}
        """The sparse sums, coalesced and in the dtype of the flat ones, which are zero there; by the position of the parameter."""
        self._keeps_sparse = keeps_sparse
        self._lazy = _lazy_gradients(self.parameters)
        self._present = [False] * len(self.parameters)
        self._filled = False

    @property
    def tensors(self) -> list[Tensor]:
        """The flat tensors of an accumulation in progress, beside ``.grad`` and :attr:`sparse`."""
        return [] if self.flat is None else [message.flat for message in self.flat.messages]

    @property
    def presence(self) -> Presence:
        """The host's record of the parameters in the sums; after a graph replay the caller has to set it."""
        return Presence(self._filled, tuple(self._present))

    @presence.setter
    def presence(self, presence: Presence) -> None:
        self._filled = presence.filled
        self._present = list(presence.parameters)

    def hold(self, parameters: Sequence[Tensor]) -> None:
        """Replaces the parameters; keeps the sums of those that were held before."""
        old_flat = self.flat
        old_present = self._present
        old_indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        old_sparse = self.sparse
        self.parameters = list(parameters)
        self._lazy = _lazy_gradients(self.parameters)
        if old_flat is None:
            return
        self.flat = _flat_sums(self.parameters)
        self.sparse = {}
        self._present = [False] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            old_index = old_indices.get(id(parameter))
            if old_index is not None:
                self.flat.views[index].copy_(old_flat.views[old_index])
                self._present[index] = old_present[old_index]
                if old_index in old_sparse:
                    self.sparse[index] = old_sparse[old_index]
        self.flat.write_flags(self._present)

    @torch.no_grad()
    def add(self, multiplier: Tensor | None = None) -> list[Tensor]:
        """Adds every ``.grad``, times ``multiplier``, to its sum, and clears ``.grad``; returns the values added."""
        assert self.flat is not None
        views = self.flat.views
        present = self._present
        grads = list(map(_grad, self.parameters))
        for index in self._lazy:
            if grads[index] is not None:
                grads[index] = grads[index].resolve_conj().resolve_neg()
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        gradients = [grads[index] for index in indices]
        if self.sparse or any(map(_is_sparse, gradients)):
            gradients = self._add_sparse(indices, gradients, multiplier)
        else:
            ops.accumulate(gradients, [views[index] for index in indices], multiplier)
        self._filled |= bool(indices)
        first_gradients = False
        for index in indices:
            self.parameters[index].grad = None
            first_gradients |= not present[index]
            present[index] = True
        if first_gradients:
            self.flat.write_flags(present)
        return gradients

    def _add_sparse(self, indices: Sequence[int], gradients: list[Tensor], multiplier: Tensor | None) -> list[Tensor]:
        """Adds ``gradients`` of the parameters at ``indices``, some of them or of the sums sparse; returns the values added."""
        assert self.flat is not None
        values = []
        dense = []
        destinations = []
        for index, gradient in zip(indices, gradients, strict=True):
            view = self.flat.views[index]
            if gradient.is_sparse and self._keeps_sparse and self._present[index] == (index in self.sparse):
                values.append(self._add_to_sparse(index, gradient, view.dtype, multiplier))
                continue
            if index in self.sparse:  # as in autograd, a sum with a dense part is dense
                view.add_(self.sparse.pop(index))
            values.append(gradient.to_dense() if gradient.is_sparse else gradient)
            dense.append(values[-1])
            destinations.append(view)
        ops.accumulate(dense, destinations, multiplier)
        return values

    def _add_to_sparse(self, index: int, gradient: Tensor, dtype: torch.dtype, multiplier: Tensor | None) -> Tensor:
        """Adds a sparse ``gradient``, times ``multiplier``, to the sum of a parameter in ``dtype``; returns the values added."""
        if is_capturing(gradient.device):
            raise NotCapturableError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse, and the size of its sum differs between "
                "steps; leave out sparse=True"
            )
        wide = gradient.to(dtype).coalesce()  # widened first: this adds the parts of one row
        addend = wide if multiplier is None else (wide * multiplier).coalesce()
        self.sparse[index] = (self.sparse[index] + addend).coalesce() if index in self.sparse else addend
        return wide.values()

    def clear(self) -> None:
        """Clears the sums, and leaves ``.grad`` unchanged."""
        if self._filled and self.flat is not None:
            self._filled = False
            self.sparse.clear()
            self._present = [False] * len(self._present)
            for tensor in self.tensors:
                tensor.zero_()

    def fits(self, tensors: Sequence[Tensor], sparse: Mapping[int, Tensor] = _NONE) -> bool:
        """Returns whether :meth:`take` accepts these tensors."""
        parameters = self.parameters
        if not all(index < len(parameters) and parameters[index].shape == one.shape for index, one in sparse.items()):
            return False
        if self.flat is None or not self.flat.messages:
            return not tensors
        return [tensor.numel() for tensor in tensors] == [message.flat.numel() for message in self.flat.messages]

    def take(self, tensors: Sequence[Tensor], sparse: Mapping[int, Tensor] = _NONE) -> None:
        """Resumes an accumulation from its saved :attr:`tensors` and :attr:`sparse`; flags mark the parameters with a gradient."""
        if self.flat is None:
            return
        for message, value in zip(self.flat.messages, tensors, strict=True):
            message.flat.copy_(value)
        for index, saved in sparse.items():
            view = self.flat.views[index]
            value = saved.to(view.device, view.dtype).coalesce()
            if self._keeps_sparse:
                self.sparse[index] = value
            else:
                view.add_(value)
        self._filled = True
        self._present = [flag != 0 for flag in self.flat.flags.tolist()]

    def local(self) -> Gradients:
        """Returns this process's own gradients, not exchanged."""
        if self.flat is None:
            return IN_PLACE
        if self.sparse:
            sums = [self.sparse.get(index, view) for index, view in enumerate(self.flat.views)]
        elif all(self._present):
            return Gradients(self.flat.tensors)
        else:
            sums = list(self.flat.views)
        return Gradients([one if present else None for one, present in zip(sums, self._present, strict=True)])

    def sum_over_ranks(
        self,
        transport: Transport,
        world_size: int,
        *,
        update_divides: bool = False,
        through: RankSums | None = None,
        message_size: float = math.inf,
        triggers: Collection[int] = (),
    ) -> Gradients:
        """Averages the sums over the ranks, in place; ``update_divides`` leaves the division to the update if that saves a pass.

        They are sent in one message for each dtype, or in pieces of at least ``message_size`` elements, or in pieces that end with
        one of ``triggers`` (ids of parameters).
        """
        assert self.flat is not None
        for index, sparse in self.sparse.items():
            self.flat.views[index].add_(sparse)
        self.sparse.clear()
        self._filled = True  # other ranks may have had gradients that this rank lacks
        divisor = self.flat.sum_over_ranks(
            transport,
            world_size,
            update_divides=update_divides,
            through=through,
            message_size=message_size,
            triggers=triggers,
        )
        return Gradients(self.flat.tensors, divisor, self.flat.take_flags(), complete=all(self._present))


def _lazy_gradients(parameters: Sequence[Tensor]) -> list[int]:
    """Returns the positions of parameters whose ``.grad`` may be a view that conjugates or negates its memory."""
    return [index for index, parameter in enumerate(parameters) if may_be_lazy(parameter)]


def _flat_sums(parameters: Sequence[Tensor]) -> FlatGradients:
    return FlatGradients(parameters, Transport(always_fp32=True), 1, key=operator.neg, frozen=(), sums=True)
