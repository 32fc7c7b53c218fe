"""Gradient accumulation: the accumulated gradients of one optimizer, in ``.grad`` or summed in flat memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.gradients.buckets import RankSums
from fabricamp.gradients.flat import IN_PLACE, FlatGradients, Gradients, Message, Transport

_grad: Final = operator.attrgetter("grad")


class Presence(NamedTuple):
    """Whether the sums have to be cleared (``filled``), and one bool per parameter: it has a gradient in the sums."""

    filled: bool
    parameters: tuple[bool, ...]


class GradientMemory:
    """The gradients of ``parameters``: autograd sums them in each ``.grad``, or with ``sums`` :meth:`add` sums them in fp32.

    A Precision makes one memory per optimizer, and a Strategy exchanges it.
    """

    def __init__(self, parameters: Sequence[Tensor], *, sums: bool = False) -> None:
        self.parameters = list(parameters)
        self.flat = _flat_sums(self.parameters) if sums else None
        """The flat sums (fp32; fp64 for fp64 parameters), followed by one flag per parameter; None without ``sums``."""
        self._present = [False] * len(self.parameters)
        self._filled = False

    @property
    def tensors(self) -> list[Tensor]:
        """The flat tensors of an accumulation in progress, beside ``.grad``."""
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
        self.parameters = list(parameters)
        if old_flat is None:
            return
        self.flat = _flat_sums(self.parameters)
        self._present = [False] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            old_index = old_indices.get(id(parameter))
            if old_index is not None:
                self.flat.views[index].copy_(old_flat.views[old_index])
                self._present[index] = old_present[old_index]
        self.flat.write_flags(self._present)

    @torch.no_grad()
    def add(self, multiplier: Tensor | None = None) -> list[Tensor]:
        """Adds every ``.grad``, times ``multiplier``, to its sum, and clears ``.grad``; returns the gradients added."""
        assert self.flat is not None
        views = self.flat.views
        present = self._present
        grads = list(map(_grad, self.parameters))
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        gradients = [grads[index].to_dense() if grads[index].is_sparse else grads[index] for index in indices]
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

    def clear(self) -> None:
        """Clears the sums, and leaves ``.grad`` unchanged."""
        if self._filled and self.flat is not None:
            self._filled = False
            self._present = [False] * len(self._present)
            for tensor in self.tensors:
                tensor.zero_()

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether :meth:`take` accepts these tensors."""
        if self.flat is None or not self.flat.messages:
            return not tensors
        sizes = [tensor.numel() for tensor in tensors]
        messages = self.flat.messages
        packed_sizes = [_packed(message)[-1].stop for message in messages]  # of an older version
        return sizes in ([message.flat.numel() for message in messages], packed_sizes)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Resumes an accumulation from its saved :attr:`tensors`; their flags mark the parameters with a gradient."""
        if self.flat is None:
            return
        messages = self.flat.messages
        if [tensor.numel() for tensor in tensors] == [message.flat.numel() for message in messages]:
            for message, value in zip(messages, tensors, strict=True):
                message.flat.copy_(value)
        else:
            self._take_packed(tensors)
        self._filled = True
        self._present = [flag != 0 for flag in self.flat.flags.tolist()]

    def _take_packed(self, tensors: Sequence[Tensor]) -> None:
        """Reads the layout of an older version: no gaps, and after each tensor the flags of its own parameters."""
        assert self.flat is not None
        for message, value in zip(self.flat.messages, tensors, strict=True):
            *slices, flags = _packed(message)
            for view, part in zip(message.views, slices, strict=True):
                view.copy_(value[part].view(view.shape))
            self.flat.flags[message.indices] = value[flags].to(self.flat.flags)

    def local(self) -> Gradients:
        """Returns this process's own gradients, not exchanged."""
        if self.flat is None:
            return IN_PLACE
        if all(self._present):
            return Gradients(self.flat.tensors)
        return Gradients(
            [view if present else None for view, present in zip(self.flat.views, self._present, strict=True)]
        )

    def sum_over_ranks(
        self, transport: Transport, world_size: int, *, update_divides: bool = False, through: RankSums | None = None
    ) -> Gradients:
        """Averages the sums over the ranks, in place; ``update_divides`` leaves the division to the update if that saves a pass."""
        assert self.flat is not None
        self._filled = True  # other ranks may have had gradients that this rank lacks
        divisor = self.flat.sum_over_ranks(transport, world_size, update_divides=update_divides, through=through)
        return Gradients(self.flat.tensors, divisor, self.flat.take_flags(), complete=all(self._present))


def _packed(message: Message) -> list[slice]:
    """Returns the slices of a message's members in the layout without gaps, and last the slice of their flags."""
    ends = list(accumulate([member.numel() for member in message.members], initial=0))
    return [slice(start, end) for start, end in pairwise([*ends, ends[-1] + len(message.members)])]


def _flat_sums(parameters: Sequence[Tensor]) -> FlatGradients:
    return FlatGradients(parameters, Transport(always_fp32=True), 1, key=operator.neg, frozen=(), sums=True)
