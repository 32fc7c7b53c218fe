"""Gradients in flat buffers: every parameter has a fixed slot, one launch fills a buffer, one collective exchanges it.

The averaged gradients stay in the buffer, and the update reads them through views.  One flag per parameter is sent after the
gradients.  So ranks can exchange equal buffers although their backwards reached different parameters, and the update knows which
parameters no rank reached.

A buffer is a :class:`Message`; the last one of an exchange also has the flags, of all parameters of the exchange::

    flat:   | slot 0 | gap | slot 1 | gap | ... | flags |        a slot starts at a multiple of 64 elements
              views: the same memory in the shapes of the parameters
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.buckets import Piece, RankSums, plan_messages
from fabricamp.ops.layouts import is_dense
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.ops.uploads import is_capturing, lasting_memory, upload

_grad: Final = operator.attrgetter("grad")
_ALIGNMENT: Final = 64  # elements: a slot starts where a kernel can load 16 bytes at once, whatever the dtype


class Gradients(NamedTuple):
    """The gradients that the update reads.

    ``tensors``: one tensor per parameter, in the order of the parameters, or None for a parameter without a gradient.  None in
    place of the list: they are where backward left them, in each ``.grad`` or in the precision's sums of micro-batches.
    ``divisor``: the update has to divide the values by it (a strategy leaves the average to the update).
    ``present``: one flag per parameter, in device memory: whether it is updated.  None: every parameter with a tensor is.
    ``complete``: this rank knows without reading the flags that every parameter with a tensor is updated.
    ``weight``: a second divisor, one number on the device; None: no second divisor.
    """

    tensors: Sequence[Tensor | None] | None = None
    divisor: float = 1.0
    present: Tensor | None = None
    complete: bool = False
    weight: Tensor | None = None

    def carried(self, scale: Tensor) -> Tensor:
        """Returns the factor to divide the values by, beside ``divisor``: ``scale`` times :attr:`weight`, on the device."""
        return scale if self.weight is None else scale * self.weight.to(scale.dtype)

    def values(self) -> Sequence[Tensor | None]:
        """Returns ``tensors`` with None for parameters without a gradient; waits for the flags unless ``complete``."""
        assert self.tensors is not None
        if self.present is None or self.complete:
            return self.tensors
        return [value if flag else None for value, flag in zip(self.tensors, self.present.tolist(), strict=True)]


IN_PLACE = Gradients()
"""Gradients that are where backward left them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The dtype in which gradients are exchanged, and when they are divided.

    ``dtype`` replaces fp32 and half dtypes.  ``predivide``: gradients are divided by it before the sum, and by the rest of the
    average after it.  None: the complete division comes before the sum, so half gradients do not overflow in the sum.
    """

    dtype: torch.dtype | None = None
    always_fp32: bool = False
    average: bool = True
    predivide: float | None = None

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which gradients of ``dtype`` are exchanged."""
        if dtype not in (torch.float32, *HALF_DTYPES):
            return dtype.to_real() if dtype.is_complex else dtype
        if self.always_fp32:
            return torch.float32
        return self.dtype or dtype

    def factors(self, world_size: int, *, half: bool) -> tuple[float, float]:
        """Returns (factor for gradients before the sum, divisor for the sums).

        Without ``half`` gradients the complete division comes before the sum: the copy into the buffer applies it for free, and
        the order makes no difference.
        """
        if not self.average:
            return 1.0 / (self.predivide or 1.0), 1.0
        if half and self.predivide is not None:
            return 1.0 / self.predivide, world_size / self.predivide
        return 1.0 / world_size, 1.0


class Message:
    """Gradients of one dtype, exchanged as one tensor ``flat``; ``indices`` are the positions of their parameters.

    Gradients are written to ``slots``; ``views`` are the same memory in the parameters' shapes.  If the message has ``flags``,
    they follow the gradients, one flag for every parameter of the complete exchange.
    """

    def __init__(
        self, indices: Sequence[int], members: Sequence[Tensor], dtype: torch.dtype, flags: int, own_flags: Tensor
    ) -> None:
        self.indices = indices
        self.members = list(members)
        self._dtype = members[0].dtype
        self._own_flags = [own_flags] if flags else []
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
        self._second_buffer: Tensor | None = None

    def gradients(self) -> list[Tensor | None]:
        """Returns each member's ``.grad``."""
        return list(map(_grad, self.members))

    def fill(self, gradients: Sequence[Tensor | None], factor: float) -> list[int]:
        """Writes :meth:`gradients` times ``factor`` into the slots, zeros for None; returns the indices of the Nones."""
        missing: list[int] = []
        if not all(map(operator.is_not, gradients, repeat(None))):
            without = [slot for slot, gradient in enumerate(gradients) if gradient is None]
            torch._foreach_zero_([self.slots[slot] for slot in without])
            missing = [self.indices[slot] for slot in without]
        if self._complex:
            gradients = [
                torch.view_as_real(gradient.resolve_conj())
                if gradient is not None and gradient.is_complex()
                else gradient
                for gradient in gradients
            ]
        try:
            self._gather([*gradients, *self._own_flags], factor)
        except RuntimeError as error:
            for member in self.members:
                if member.grad is not None and member.grad.layout is not torch.strided:
                    raise ConfigError(
                        f"a parameter of shape {tuple(member.shape)} has a {member.grad.layout} gradient, which cannot be "
                        "exchanged; build the embedding with sparse=False"
                    ) from error
            raise
        return missing

    def pieces(self, elements: float, triggers: Collection[int] = ()) -> list[slice]:
        """Returns the parts of ``flat`` to exchange by themselves, as :func:`plan_messages` fills buckets; flags go with the last.

        ``triggers`` are ids of parameters.
        """
        ends: list[int] = []
        begin = 0
        for member, end in zip(self.members, self._starts[1:], strict=True):
            if (id(member) in triggers) if triggers else end - begin >= elements:
                ends.append(end)
                begin = end
        if ends and ends[-1] == self._starts[-1]:
            ends.pop()
        return [slice(*edges) for edges in pairwise([0, *ends, self.flat.numel()])]

    def buffer_in(self, dtype: torch.dtype) -> Tensor:
        """Returns the buffer to exchange in ``dtype``: ``flat`` if it has this dtype, else a second buffer."""
        if dtype == self.flat.dtype:
            return self.flat
        if self._second_buffer is None or self._second_buffer.dtype != dtype:
            self._second_buffer = torch.empty_like(self.flat, dtype=dtype)
        return self._second_buffer

    def convert(self, divisor: float) -> list[Tensor]:
        """Divides the received sums; returns them in the members' own dtype and shapes, as views of :attr:`result`."""
        if self.result is not self.values:
            self.result.copy_(self.values)
        if divisor != 1:
            self.result.div_(divisor)
        return self._results

    @functools.cached_property
    def result(self) -> Tensor:
        """The gradients in the members' own dtype: ``values`` itself if they are exchanged in this dtype."""
        if self.flat.dtype == self._dtype.to_real():
            return self.values
        return torch.empty_like(self.values, dtype=self._dtype)

    @functools.cached_property
    def _results(self) -> list[Tensor]:
        return self.views if self.result is self.values else cut(self.result, self.members, self._starts)


def cut(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Returns views of ``flat`` from each of ``starts``, in the shapes of ``like``, and in their strides if they are dense."""
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
    """Exchanges the gradients of ``parameters``, except the ``frozen`` ones (ids; None: those frozen now).

    Messages are planned over the parameters in the order of ``key``, highest first; None: in reverse of the order given.
    ``sums``: gradients are accumulated in the messages and not copied from ``.grad``, so several dtypes may share one message.
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
        device = self.parameters[order[0]].device if order else torch.device("cpu")
        self._own_flags = torch.ones(len(self.parameters), dtype=torch.float32, device=device)
        """One flag per parameter, as this rank sends it: 0 if the parameter has no gradient on this rank."""
        self._unset_flags: list[int] = []
        """Positions of the zeros in :attr:`_own_flags`."""
        self._rank_sums = RankSums()
        self._missing: list[int] = []
        self.missing: Sequence[int] = ()
        """Positions of the parameters without a gradient on this rank in the last exchange."""
        self._pieces: list[list[slice]] | None = None  # of each message, if a sum over ranks cuts them
        self._captured: list[Tensor] = []  # flags that captured graphs write at each replay: kept alive here
        self.messages = self._plan(order, transport, message_size, {id(self.parameters[index]) for index in triggers})
        half = any(message.flat.dtype in HALF_DTYPES for message in self.messages)
        self._factor, self.divisor = transport.factors(world_size, half=half)
        views: dict[int, Tensor] = {}
        for message in self.messages:
            views.update(zip(message.indices, message.views, strict=True))
        self.tensors = tuple([views.get(index) for index in range(len(self.parameters))])  # always the same memory
        # The update reads flags in fp32: the received ones in place if they are exchanged in fp32, else a copy (take_flags).
        self.present = self._own_flags.clone()
        if self.messages and self.messages[-1].flat.dtype is torch.float32:
            self.present = self.messages[-1].flags

    def _plan(self, order: list[int], transport: Transport, message_size: float, triggers: set[int]) -> list[Message]:
        members = [self.parameters[index] for index in order]
        dtypes = [transport.dtype_for(member.dtype) for member in members]
        pieces = [
            Piece(member.numel(), (None if self._sums else member.dtype, dtype, member.device))
            for member, dtype in zip(members, dtypes, strict=True)
        ]
        plan = plan_messages(
            pieces, message_size, [position for position, member in enumerate(members) if id(member) in triggers]
        )
        return [
            Message(
                [order[position] for position in bucket.indices],
                [members[position] for position in bucket.indices],
                dtypes[bucket.indices[0]],
                len(self.parameters) if number == len(plan) - 1 else 0,
                self._own_flags,
            )
            for number, bucket in enumerate(plan)
        ]

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The flat memory in the parameters' shapes; only if no parameter is frozen."""
        return cast("tuple[Tensor, ...]", self.tensors)

    @property
    def flags(self) -> Tensor:
        """One number per parameter, after the gradients of the last message: 0 for a parameter without a gradient."""
        return self.messages[-1].flags if self.messages else self._own_flags

    def write_flags(self, present: Sequence[bool]) -> None:
        """Writes the flags of the parameters with a gradient; does not wait."""
        if all(present):
            self.flags.fill_(1)
            return
        flags = torch.tensor(present, dtype=torch.float32, device="cpu")
        if is_capturing(self.flags.device):
            on_device = lasting_memory(flags.shape, flags.dtype, self.flags.device)
            upload(flags.numpy(), on_device)
            self._captured.append(on_device)
            self.flags.copy_(on_device)
        else:
            self.flags.copy_(flags.pin_memory() if self.flags.is_cuda else flags, non_blocking=True)

    def take_flags(self) -> Tensor:
        """Returns the flags as fp32 numbers, always in the same memory."""
        if self.messages and self.messages[-1].flags is not self.present:
            self.present.copy_(self.messages[-1].flags)
        return self.present

    def sum_over_ranks(
        self,
        transport: Transport,
        world_size: int,
        *,
        update_divides: bool,
        through: RankSums | None = None,
        message_size: float = math.inf,
        triggers: Collection[int] = (),
    ) -> float:
        """Sums the messages over the ranks, in place and concurrently; returns the divisor that is left for the update.

        ``message_size`` and ``triggers`` (ids of parameters) cut them into :meth:`Message.pieces`.
        """
        dtypes = [transport.dtype_for(message.flat.dtype) for message in self.messages]
        half = any(dtype in HALF_DTYPES for dtype in dtypes)
        factor, divisor = transport.factors(world_size, half=half)
        if update_divides and transport.average and not half:
            factor = 1.0
            divisor = float(world_size)  # saves a separate pass for the division
        buffers = [message.buffer_in(dtype) for message, dtype in zip(self.messages, dtypes, strict=True)]
        values = (
            buffer if buffer is message.flat and factor == 1 else torch.mul(message.flat, factor, out=buffer)
            for message, buffer in zip(self.messages, buffers, strict=True)
        )
        if message_size < math.inf or triggers:
            if self._pieces is None:
                self._pieces = [message.pieces(message_size, triggers) for message in self.messages]
            values = (whole[piece] for whole, pieces in zip(values, self._pieces, strict=True) for piece in pieces)
        (through or self._rank_sums).run(values)
        for message, buffer in zip(self.messages, buffers, strict=True):
            if buffer is not message.flat:
                message.flat.copy_(buffer)
        return divisor

    def exchange(self, through: RankSums | None = None) -> Gradients:
        """Sums every ``.grad`` over the ranks, or by ``through``; returns the received gradients."""
        filled = (self._filled(message, message.gradients()) for message in self.messages)
        (through or self._rank_sums).run(filled, alone=len(self.messages) == 1)
        return self._received()

    def send(
        self,
        message: Message,
        gradients: Sequence[Tensor | None],
        group: dist.ProcessGroup | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Fills a message with its ``gradients`` and starts its all-reduce; every rank has to send ``messages`` in their order.

        ``wait``: the current stream (on a CPU the host) waits for the all-reduce; else :meth:`receive` does.
        """
        self._rank_sums.start(self._filled(message, gradients), group, wait=wait)

    def _filled(self, message: Message, gradients: Sequence[Tensor | None]) -> Tensor:
        if message is self.messages[-1]:
            self._set_own_flags(message, gradients)
        self._missing += message.fill(gradients, self._factor)
        return message.flat

    def _set_own_flags(self, last: Message, gradients: Sequence[Tensor | None]) -> None:
        """Writes the flags of the parameters with a gradient on this rank, if they changed since the last exchange."""
        pairs = zip(last.indices, gradients, strict=True)
        missing = [*self._missing, *(index for index, gradient in pairs if gradient is None)]
        if missing == self._unset_flags:
            return
        flags = torch.ones_like(self._own_flags, device="cpu")
        flags[missing] = 0
        self._own_flags.copy_(flags.pin_memory() if self._own_flags.is_cuda else flags, non_blocking=True)
        self._unset_flags = missing

    def receive(self) -> Gradients:
        """Makes torch's current stream wait for all messages; returns the received gradients."""
        self._rank_sums.wait()
        return self._received()

    def _received(self) -> Gradients:
        self.missing = self._missing
        self._missing = []
        return Gradients(self.tensors, self.divisor, self.take_flags(), complete=not self.missing)

    def write_back(self, gradients: Gradients) -> None:
        """Sets each ``.grad`` to the received average, a view of the flat memory; None if no rank had a gradient."""
        present = [True] * len(self.parameters) if gradients.complete else self.present.tolist()
        for message in self.messages:
            results = message.convert(self.divisor)
            for index, member, result in zip(message.indices, message.members, results, strict=True):
                member.grad = result if present[index] else None

    def copy_back(self, gradients: Gradients) -> None:
        """Copies the received average into each ``.grad``; creates it if only other ranks had one, leaves None if no rank had."""
        present = [True] * len(self.parameters) if gradients.complete else self.present.tolist()
        arrived: list[tuple[Tensor, Tensor]] = []
        for message in self.messages:
            results = message.convert(self.divisor)
            for index, member, result in zip(message.indices, message.members, results, strict=True):
                if member.grad is not None:
                    arrived.append((member.grad, result))
                elif present[index]:
                    member.grad = torch.empty_like(member).copy_(result)
        if arrived:
            torch._foreach_copy_([gradient for gradient, _ in arrived], [result for _, result in arrived])
