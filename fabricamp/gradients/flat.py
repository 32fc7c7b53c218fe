"""Gradients in flat buffers: every parameter has its place, one launch fills a buffer, one collective sends it.

What arrives stays there: the update reads it through views.  One flag per parameter travels behind the gradients, so that ranks
whose backwards reached different parameters still exchange the same, and the update knows which ones no rank reached.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.buckets import Piece, plan_messages
from fabricamp.gradients.sums import RankSums
from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.ops.layouts import is_dense
from fabricamp.ops.uploads import is_capturing, lasting_memory, upload

_grad: Final = operator.attrgetter("grad")
_ALIGNMENT: Final = 64  # elements: a slot starts where a kernel can load 16 bytes at once, whatever the dtype


class Gradients(NamedTuple):
    """What the update reads.

    ``tensors`` None: each parameter's own ``.grad``; else one tensor (or None) a parameter, in the order asked for.
    ``divisor``: what the values still have to be divided by (the average that a strategy folds into the update).
    ``present`` None: a parameter takes part where its tensor is not None; else one flag per parameter, in device memory.
    ``complete``: this rank knows, without a look at the flags, that every parameter with a tensor takes part.
    ``weight``: what the values still have to be divided by beside ``divisor``, one number on the device; None: nothing.
    """

    tensors: Sequence[Tensor | None] | None = None
    divisor: float = 1.0
    present: Tensor | None = None
    complete: bool = False
    weight: Tensor | None = None

    def carried(self, scale: Tensor) -> Tensor:
        """Returns what the values still carry on the device: ``scale`` times :attr:`weight`."""
        return scale if self.weight is None else scale * self.weight.to(scale.dtype)

    def values(self) -> Sequence[Tensor | None]:
        """Returns ``tensors``, None where a parameter takes no part; waits for the flags where this rank cannot know."""
        assert self.tensors is not None
        if self.present is None or self.complete:
            return self.tensors
        return [value if here else None for value, here in zip(self.tensors, self.present.tolist(), strict=True)]


IN_PLACE = Gradients()
"""Gradients that are ready where autograd left them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """In which dtype gradients travel, and when they are divided.

    ``dtype`` takes the place of fp32 and half ones.  ``predivide``: what gradients are divided by before the sum, the rest of the
    average comes after it; None: all of it comes before, so that half gradients do not overflow in the sum.
    """

    dtype: torch.dtype | None = None
    always_fp32: bool = False
    average: bool = True
    predivide: float | None = None

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Returns what gradients of ``dtype`` travel in."""
        if dtype not in (torch.float32, *HALF_DTYPES):
            return dtype.to_real() if dtype.is_complex else dtype
        if self.always_fp32:
            return torch.float32
        return self.dtype or dtype

    def factors(self, world_size: int, *, half: bool) -> tuple[float, float]:
        """Returns what gradients are multiplied by on their way in, and what their sums have to be divided by.

        Without ``half`` ones it makes no difference when they are divided: all of it costs nothing on the way in.
        """
        if not self.average:
            return 1.0 / (self.predivide or 1.0), 1.0
        if half and self.predivide is not None:
            return 1.0 / self.predivide, world_size / self.predivide
        return 1.0 / world_size, 1.0


class Message:
    """Gradients of one dtype that travel as one tensor, ``flat``; ``indices`` say which parameters they are of.

    ``slots`` are where they are written, ``views`` the same memory in the parameters' shapes.  The ``flags``, where the message
    carries them, are behind the gradients, one for every parameter of the whole exchange.
    """

    def __init__(
        self, indices: Sequence[int], members: Sequence[Tensor], dtype: torch.dtype, flags: int, marks: Tensor
    ) -> None:
        self.indices = indices
        self.members = list(members)
        self._dtype = members[0].dtype
        self._marks = [marks] if flags else []
        self._complex = any(member.is_complex() for member in members)
        sizes = [member.numel() * (2 if member.is_complex() else 1) for member in members]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.flat = torch.zeros(starts[-1] + flags, dtype=dtype, device=members[0].device)
        self.flags = self.flat[starts[-1] :]
        self.values = self.flat[: starts[-1]]
        self.views = cut(self.flat, self.members, starts)
        self.slots = [torch.view_as_real(view) if view.is_complex() else view for view in self.views]
        self._gather = ops.Gather([*self.slots, self.flags] if flags else self.slots)
        self._starts = starts
        self._narrow: Tensor | None = None

    def fill(self, factor: float) -> list[int]:
        """Writes the members' ``.grad`` times ``factor`` into the slots, zeros where there is none; returns which these are."""
        gradients: list[Tensor | None] = list(map(_grad, self.members))
        missing: list[int] = []
        if not all(map(operator.is_not, gradients, repeat(None))):
            absent = [place for place, gradient in enumerate(gradients) if gradient is None]
            torch._foreach_zero_([self.slots[place] for place in absent])
            missing = [self.indices[place] for place in absent]
        if self._complex:
            gradients = [torch.view_as_real(one) if one is not None and one.is_complex() else one for one in gradients]
        self._write(gradients, factor)
        return missing

    def _write(self, gradients: list[Tensor | None], factor: float) -> None:
        try:
            self._gather([*gradients, *self._marks], factor)
        except RuntimeError as error:
            for member in self.members:
                if member.grad is not None and member.grad.layout is not torch.strided:
                    raise ConfigError(
                        f"a parameter of shape {tuple(member.shape)} has a {member.grad.layout} gradient, which cannot be "
                        "exchanged; build the embedding with sparse=False"
                    ) from error
            raise

    def travelling(self, dtype: torch.dtype) -> Tensor:
        """Returns the memory that sums travel in as ``dtype``: their own, or a second one."""
        if dtype == self.flat.dtype:
            return self.flat
        if self._narrow is None or self._narrow.dtype != dtype:
            self._narrow = torch.empty_like(self.flat, dtype=dtype)
        return self._narrow

    def convert(self, divisor: float) -> list[Tensor]:
        """Divides what has arrived; returns it in the members' own dtype and shapes, views of :attr:`result`."""
        if self.result is not self.values:
            self.result.copy_(self.values)
        if divisor != 1:
            self.result.div_(divisor)
        return self._results

    @functools.cached_property
    def result(self) -> Tensor:
        """The gradients in the members' own dtype: ``values`` themselves where they travel in it."""
        if self.flat.dtype == self._dtype.to_real():
            return self.values
        return torch.empty_like(self.values, dtype=self._dtype)

    @functools.cached_property
    def _results(self) -> list[Tensor]:
        return self.views if self.result is self.values else cut(self.result, self.members, self._starts)


def cut(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Returns views of ``flat`` from ``starts`` on, each in the shape of one of ``like``, and in its strides where it is dense."""
    views = []
    for tensor, start in zip(like, starts, strict=False):
        size = tensor.numel() * (2 if tensor.is_complex() else 1)
        piece = flat[start : start + size]
        if tensor.is_complex():
            piece = torch.view_as_complex(piece.view(-1, 2))
        if is_dense(tensor):
            views.append(piece.as_strided(tensor.shape, tensor.stride()))
        else:
            views.append(piece.view(tensor.shape))
    return views


class FlatGradients:
    """The exchange of the gradients of ``parameters``, but for those that are ``frozen`` (ids; None: those that are now).

    Messages are planned over the parameters in the order of ``key``, highest first; None: the last one given first.  ``sums``:
    what is in them is added up there and not copied from ``.grad``, so that gradients of several dtypes may share one.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        transport: Transport,
        world_size: int,
        *,
        message_size: float = float("inf"),
        triggers: Collection[int] = (),
        key: Callable[[int], int] | None = None,
        frozen: Collection[int] | None = None,
        sums: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._sums = sums
        if frozen is None:
            frozen = {id(parameter) for parameter in self.parameters if not parameter.requires_grad}
        self.frozen = [parameter for parameter in self.parameters if id(parameter) in frozen]
        order = [index for index, parameter in enumerate(self.parameters) if id(parameter) not in frozen]
        order.sort(key=key, reverse=True)
        self._rank_sums = RankSums()
        self._missing: list[int] = []
        self.missing: Sequence[int] = ()
        """Which parameters had no gradient on this rank in the last exchange."""
        self._marked: list[int] = []
        self._captured: list[Tensor] = []  # flags that a graph writes as long as it lives
        self.messages = self._plan(order, transport, message_size, {id(self.parameters[one]) for one in triggers})
        half = any(one.flat.dtype in HALF_DTYPES for one in self.messages)
        self._factor, self.divisor = transport.factors(world_size, half=half)
        views = {index: view for one in self.messages for index, view in zip(one.indices, one.views, strict=True)}
        self.tensors = tuple([views.get(index) for index in range(len(self.parameters))])  # always the same memory
        self.present = self._marks.clone()
        if self.messages and self.messages[-1].flat.dtype is torch.float32:
            self.present = self.messages[-1].flags

    def _plan(self, order: list[int], transport: Transport, message_size: float, triggers: set[int]) -> list[Message]:
        members = [self.parameters[index] for index in order]
        device = members[0].device if members else torch.device("cpu")
        self._marks = torch.ones(len(self.parameters), dtype=torch.float32, device=device)
        dtypes = [transport.dtype_for(member.dtype) for member in members]
        pieces = [
            Piece(member.numel(), (None if self._sums else member.dtype, dtype, member.device))
            for member, dtype in zip(members, dtypes, strict=True)
        ]
        places = [place for place, member in enumerate(members) if id(member) in triggers]
        plan = plan_messages(pieces, message_size, places)
        return [
            Message(
                [order[place] for place in bucket.indices],
                [members[place] for place in bucket.indices],
                dtypes[bucket.indices[0]],
                len(self.parameters) if number == len(plan) - 1 else 0,
                self._marks,
            )
            for number, bucket in enumerate(plan)
        ]

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The flat memory in the parameters' shapes, where none is frozen."""
        return cast("tuple[Tensor, ...]", self.tensors)

    @property
    def flags(self) -> Tensor:
        """One number per parameter, behind the gradients of the last message: 0 where it takes no part."""
        return self.messages[-1].flags if self.messages else self._marks

    def write_flags(self, present: Sequence[bool]) -> None:
        """Writes which parameters take part; without a wait."""
        if all(present):
            self.flags.fill_(1)
            return
        marks = torch.tensor(present, dtype=torch.float32, device="cpu")
        if is_capturing(self.flags.device):
            on_device = lasting_memory(marks.shape, marks.dtype, self.flags.device)
            upload(marks.numpy(), on_device)
            self._captured.append(on_device)
            self.flags.copy_(on_device)
        else:
            self.flags.copy_(marks.pin_memory() if self.flags.is_cuda else marks, non_blocking=True)

    def take_flags(self) -> Tensor:
        """Returns the flags as fp32 numbers, always the same memory."""
        if self.messages and self.messages[-1].flags is not self.present:
            self.present.copy_(self.messages[-1].flags)
        return self.present

    def sum_over_ranks(
        self, transport: Transport, world_size: int, *, update_divides: bool, through: RankSums | None = None
    ) -> float:
        """Sums the messages as they are over the ranks, in place, all under way at once; returns what is left to divide by."""
        dtypes = [transport.dtype_for(message.flat.dtype) for message in self.messages]
        half = any(dtype in HALF_DTYPES for dtype in dtypes)
        factor, divisor = transport.factors(world_size, half=half)
        if update_divides and transport.average and not half:
            factor, divisor = 1.0, float(world_size)  # no pass of its own
        travelling = [message.travelling(dtype) for message, dtype in zip(self.messages, dtypes, strict=True)]
        (through or self._rank_sums).run(
            one if one is message.flat and factor == 1 else torch.mul(message.flat, factor, out=one)
            for message, one in zip(self.messages, travelling, strict=True)
        )
        for message, one in zip(self.messages, travelling, strict=True):
            if one is not message.flat:
                message.flat.copy_(one)
        return divisor

    def exchange(self, through: RankSums | None = None) -> Gradients:
        """Sums every ``.grad`` over the ranks, or whatever ``through`` sums over; returns what has arrived."""
        (through or self._rank_sums).run(map(self._filled, self.messages), alone=len(self.messages) == 1)
        return self.receive()

    def send(self, message: Message, group: dist.ProcessGroup | None = None) -> None:
        """Fills a message and sends it; ``messages`` go in their order, on every rank."""
        self._rank_sums.start(self._filled(message), group)

    def _filled(self, message: Message) -> Tensor:
        if message is self.messages[-1]:
            self._mark(message)
        self._missing += message.fill(self._factor)
        return message.flat

    def _mark(self, message: Message) -> None:
        """Writes which parameters have a gradient here, as the last message carries it; most often nothing has changed."""
        pairs = zip(message.indices, message.members, strict=True)
        missing = [*self._missing, *(index for index, member in pairs if member.grad is None)]
        if missing == self._marked:
            return
        marks = torch.ones_like(self._marks, device="cpu")
        marks[missing] = 0
        self._marks.copy_(marks.pin_memory() if self._marks.is_cuda else marks, non_blocking=True)
        self._marked = missing

    def receive(self) -> Gradients:
        """Makes torch's current stream wait for all messages; returns what has arrived."""
        self._rank_sums.wait()
        self.missing, self._missing = self._missing, []
        return Gradients(self.tensors, self.divisor, self.take_flags(), complete=not self.missing)

    def write_back(self, gradients: Gradients) -> None:
        """Makes each ``.grad`` the average that has arrived, a view of the flat memory; None where no rank had one."""
        here = [True] * len(self.parameters) if gradients.complete else self.present.tolist()
        for message in self.messages:
            results = message.convert(self.divisor)
            for index, member, result in zip(message.indices, message.members, results, strict=True):
                member.grad = result if here[index] else None

    def copy_back(self, gradients: Gradients) -> None:
        """Copies what has arrived into each ``.grad``; new ones where only other ranks had one, None where no rank had."""
        here = [True] * len(self.parameters) if gradients.complete else self.present.tolist()
        arrived: list[tuple[Tensor, Tensor]] = []
        for message in self.messages:
            results = message.convert(self.divisor)
            for index, member, result in zip(message.indices, message.members, results, strict=True):
                if member.grad is not None:
                    arrived.append((member.grad, result))
                elif here[index]:
                    member.grad = torch.empty_like(member).copy_(result)
        if arrived:
            torch._foreach_copy_([gradient for gradient, _ in arrived], [result for _, result in arrived])
