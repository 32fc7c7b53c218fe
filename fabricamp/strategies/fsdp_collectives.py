"""FSDP's all-gathers and reduce-scatters on devices that run kernels.

In this order: the casts of shards where torch copies them into the memory that is gathered, all of a unit by one launch
(:class:`ShardCast`); the reduce-scatter, whose gradients are copied by one launch (:class:`ScatterCasts`); the all-gather of ranks
that reach each other's memory (:class:`PeerGather`), as those of one machine do; what puts them into a module.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import statistics
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.flat_casts import DTYPES, FlatCast, Piece
from fabricamp.ops.peer_memory import NO_TURN, PeerBuffers, checked_exchange, workspace_of
from fabricamp.ops.rank_sums import rank_sums
from fabricamp.ops.shards import is_shard, local
from fabricamp.torch_private import (
    current_stream_is_capturing,
    fsdp_copy_ops,
    sharded_parameters,
    tree_map_only,
    unwatched_operations,
    wrapper_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.fsdp import FSDPModule

_LOG: Final = logging.getLogger(__name__)
VARIABLE: Final = "FABRICAMP_FSDP_EXCHANGE"
_GATHERED: Final = 2
"""Buffers of gathered weights: torch keeps two units at a time."""
_SCATTERED: Final = 1
"""Buffers of gradients: torch waits for the reduce-scatter of a unit before it copies the next unit's gradients."""
_FEWEST: Final = 2**16
"""Elements of a shard that are worth calls of Python functions before and after each gather; torch copies smaller ones."""


class ShardCast(Tensor):
    """A shard as it is gathered, flat and in another dtype, without memory of its own.

    torch's ``fsdp.all_gather_copy_in`` casts it into the memory that is gathered, all shards of a unit by one launch on devices
    that run kernels.  Any other operation gets its :meth:`value`.

    With a ``scale``, one value in fp32, it is e4m3: ``shard`` is rounded to ``dtype`` first, then multiplied in fp32.
    """

    __torch_function__ = unwatched_operations  # type: ignore[assignment]  # torch declares another signature
    shard: Tensor
    rounded: torch.dtype
    scale: Tensor | None
    plan: _CopyIn | None
    in_bytes: ShardCast | None

    @staticmethod
    def __new__(
        cls: type[Self], shard: Tensor, dtype: torch.dtype, scale: Tensor | None = None, *, as_bytes: bool = False
    ) -> Self:
        """Returns the cast; ``as_bytes``: it shows its bytes as elements."""
        target = dtype if scale is None else torch.float8_e4m3fn
        shown = torch.uint8 if as_bytes else target
        self: Any = wrapper_tensor(cls, (shard.numel() * target.itemsize // shown.itemsize,), shown, shard.device)
        self.shard = shard
        self.rounded = dtype
        self.scale = scale
        self.plan = None
        self.in_bytes = None if as_bytes else ShardCast(shard, dtype, scale, as_bytes=True)
        return self  # type: ignore[no-any-return]

    def view(self, *shape: Any) -> Tensor:
        """Returns itself for ``view(-1)`` and its bytes for ``view(torch.uint8)``, as FSDP asks for; else a view of its value."""
        if shape == (-1,):
            return self
        if shape == (torch.uint8,) and self.in_bytes is not None:
            return self.in_bytes
        return self.value().view(*shape)

    def value(self) -> Tensor:
        """Returns the cast in memory of its own."""
        cast = self.shard.to(self.rounded)
        if self.scale is not None:
            # The scale has a dimension, so that the product is in fp32.
            scaled = torch.empty_like(cast, dtype=torch.float8_e4m3fn)
            cast = torch.mul(cast, self.scale.view(1), out=scaled)
        return cast.view(-1).view(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        if func is fsdp_copy_ops().all_gather_copy_in and not kwargs:
            return _copied_in(*args)
        return func(*tree_map_only(cls, cls.value, args), **tree_map_only(cls, cls.value, kwargs or {}))


def _copied_in(
    inputs: Sequence[Tensor], output: Tensor, sizes: Sequence[int], elements: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Does as torch's operation: writes ``inputs`` into this rank's part of ``output``, and returns both."""
    own = output.narrow(0, elements * rank, elements)
    first = next(tensor for tensor in inputs if isinstance(tensor, ShardCast))
    plan = first.plan
    if plan is None or not plan.is_for(inputs):
        plan = first.plan = _CopyIn(inputs, sizes, output)
    plan(inputs, own)
    return own, output


class _CopyIn:
    """Where the inputs of a unit's gather lie in the memory that is gathered."""

    def __init__(self, inputs: Sequence[Tensor], sizes: Sequence[int], output: Tensor) -> None:
        self._casts = [tensor if isinstance(tensor, ShardCast) else None for tensor in inputs]
        self._sizes = list(sizes)
        self._launched: list[tuple[FlatCast, list[Tensor]]] = []
        by_kernel: dict[tuple[torch.dtype, torch.dtype], list[tuple[ShardCast, int]]] = {}
        self._copied = []
        """The inputs that torch copies."""
        places = accumulate(self._sizes, initial=0)
        for index, (cast, place) in enumerate(zip(self._casts, places, strict=False)):
            if cast is not None and _runs(cast):
                key = (cast.shard.dtype, cast.rounded)
                by_kernel.setdefault(key, []).append((cast, place * output.element_size()))
            else:
                self._copied.append(index)
        for (source, target), own in by_kernel.items():
            pieces = [
                Piece(number, 0, place, cast.shard.numel(), cast.scale) for number, (cast, place) in enumerate(own)
            ]
            shards = [cast.shard for cast, _ in own]
            self._launched.append((FlatCast(pieces, source, target, output.device), shards))

    def is_for(self, inputs: Sequence[Tensor]) -> bool:
        """Returns whether these are the inputs that it was made for; what torch copies is new in each gather."""
        if len(inputs) != len(self._casts):
            return False
        return all(
            tensor is cast or (cast is None and not isinstance(tensor, ShardCast) and tensor.numel() == size)
            for tensor, cast, size in zip(inputs, self._casts, self._sizes, strict=True)
        )

    def __call__(self, inputs: Sequence[Tensor], own: Tensor) -> None:
        for cast, shards in self._launched:
            cast(shards, own)
        if self._copied:
            parts = own.split_with_sizes(self._sizes)
            values = [_value(inputs[index]) for index in self._copied]
            torch._foreach_copy_([parts[index] for index in self._copied], values)


def _runs(cast: ShardCast) -> bool:
    shard = cast.shard
    return runs_kernels(shard.device) and shard.is_contiguous() and shard.dtype in DTYPES and cast.rounded in DTYPES


def _value(tensor: Tensor) -> Tensor:
    return tensor.value() if isinstance(tensor, ShardCast) else tensor


class ShardFunctions:
    """The functions that FSDP calls for a shard: the object itself before its gather, and ``after_gather``.

    A copy of the shard has the object itself, which does nothing there: a copy is in no unit of FSDP.
    """

    def __call__(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], Any]:
        """Returns what is gathered, as a tuple, and what ``after_gather`` gets as ``metadata``."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    # torch asks for the signature before each gather, and deriving it would take most of the host time of this call.
    __signature__ = inspect.Signature(list(inspect.signature(__call__).parameters.values())[1:])


class CastShard(ShardFunctions):
    """Gathers a shard in another dtype."""

    def __init__(self, shard: Tensor, dtype: torch.dtype) -> None:
        self._cast = ShardCast(shard, dtype)

    def __call__(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        """Returns the cast, and None."""
        return (self._cast,), None

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Returns the gathered values, to which torch gives their shape; nothing with ``out``, which has their memory."""
        return None if out is not None else (gathered[0], ())


class FlatGradients(Tensor):
    """What a unit's gradients are scattered from: torch's ``fsdp.chunk_cat`` casts them into it by one launch."""

    __torch_function__ = unwatched_operations  # type: ignore[assignment]  # torch declares another signature
    place: _Place
    exchange: ScatterCasts

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], place: _Place, exchange: ScatterCasts) -> Self:
        """Returns a tensor that has the memory of ``place`` where an operation asks for it."""
        self: Any = wrapper_tensor(cls, shape, place.dtype, place.device)
        self.place = place
        self.exchange = exchange
        return self  # type: ignore[no-any-return]

    def view(self, *shape: Any) -> Tensor:
        """Returns ``view(ranks, -1)``, as FSDP asks for, in the same place; else a view of the memory."""
        if len(shape) == 2 and shape[1] == -1:
            return FlatGradients((shape[0], self.numel() // shape[0]), self.place, self.exchange)
        return self.place.memory().view(*shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on the memory."""
        if func is fsdp_copy_ops().chunk_cat:
            tensors, dimension, ranks = args
            flat = kwargs["out"]
            if dimension != 0 or not flat.exchange.copy_in(tensors, ranks, flat.place):
                func(tensors, dimension, ranks, out=flat.memory())
            flat.exchange.output_is_next = True
            return None
        return func(*tree_map_only(cls, cls.memory, args), **tree_map_only(cls, cls.memory, kwargs or {}))

    def memory(self) -> Tensor:
        """Returns memory of their own."""
        return self.place.memory().view(self.shape)


class _Place:
    """Where flat gradients are: in memory of their own, or, not cast yet, in a buffer that the other ranks read."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.elements = elements
        self.dtype = dtype
        self.device = device
        self.halves: Tensor | None = None
        """The gradients in a buffer."""
        self.turn = NO_TURN
        """Number of this buffer."""
        self._memory: Tensor | None = None

    def memory(self) -> Tensor:
        """Returns memory of their own; gradients in a buffer are copied into it."""
        if self._memory is None:
            self._memory = torch.empty(self.elements, dtype=self.dtype, device=self.device)
            if self.halves is not None:
                self._memory.copy_(self.halves)
                self.halves = None
        return self._memory


class ComputesMemory:
    """Gives scattered gradients memory of the stream that computes.

    torch takes it from the stream that scatters, whose memory nothing else can use.  Then gradients never take the place of
    activations, which backward frees, nor these that of gradients, which are freed before the forward.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        """What may still be written on another stream: freed memory belongs to the stream that computes at once."""

    def allocate(self, size: Sequence[int], dtype: torch.dtype, stream: torch.cuda.Stream) -> Tensor:
        """Returns memory; called on a stream that has waited for ``stream``, the one that computes."""
        with torch.cuda.stream(stream):
            memory = torch.empty(*size, dtype=dtype, device=stream.device)
        self._held.append(memory)
        return memory

    def forget(self) -> None:
        """Called when the stream that computes has waited for all that is written."""
        self._held.clear()

    def wait(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Makes the current stream wait for ``streams`` if a backward did not end, as after an exception."""
        if self._held and not current_stream_is_capturing():
            current = torch.cuda.current_stream(self._held[0].device)
            for stream in streams:
                current.wait_stream(stream)
            self.forget()


class ScatterCasts:
    """A unit's reduce-scatter, as ``FSDPModule.set_custom_reduce_scatter`` takes it, with one launch for the copies.

    With ``peers`` the ranks read each other's gradients, before the cast, and add them up themselves.  Without, and where the
    gradients are larger than a buffer, torch does.
    """

    def __init__(
        self, peers: PeerBuffers | None = None, memory: ComputesMemory | None = None, records: Sequence[Any] = ()
    ) -> None:
        self._of_computes = memory
        self._records = records
        self._computes: torch.cuda.Stream | None = None
        """The stream that computes, in an eager step with ``memory``."""
        self.output_is_next = False
        """Whether torch allocates its output next: it allocates the input, copies gradients into it, then allocates the output."""
        self._peers = peers
        self._casts: dict[tuple[Any, ...], FlatCast | None] = {}
        """By layout of the gradients; all stay, as CUDA graphs hold the addresses of their tables."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the input, or for the output."""
        if self.output_is_next:
            self.output_is_next = False
            # What is added to gradients is dropped before it is read, so it has to stay the scattering stream's.
            adds = any(record.sharded_param.grad is not None for record in self._records)
            if self._of_computes is not None and self._computes is not None and not adds:
                return self._of_computes.allocate(size, dtype, self._computes)
            return torch.empty(*size, dtype=dtype, device=device)
        if self._of_computes is not None:
            self._computes = None if current_stream_is_capturing() else torch.cuda.current_stream(device)
        return FlatGradients(size, _Place(math.prod(size), dtype, device), self)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Scatters the sums, or averages, over the ranks."""
        place = input_tensor.place if isinstance(input_tensor, FlatGradients) else None
        if place is not None and place.halves is not None and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            self._add_up(output_tensor, place, average=op == dist.ReduceOp.AVG)
            return None
        memory = input_tensor if place is None else place.memory()
        return dist.reduce_scatter_tensor(output_tensor, memory, op=op, group=group, async_op=async_op)

    def _add_up(self, output: Tensor, place: _Place, *, average: bool) -> None:
        peers, halves = self._peers, place.halves
        assert peers is not None, "it has the buffer"
        assert halves is not None
        share = halves.numel() // peers.ranks
        others = torch.empty(peers.ranks - 1, share, dtype=halves.dtype, device=halves.device)
        peers.wait_for_use()
        peers.barrier()
        ranks = [rank for rank in range(peers.ranks) if rank != peers.rank]
        # Each rank begins with another one.
        for index in range(len(ranks)):
            line = (index + peers.rank) % len(ranks)
            theirs = peers.buffer(place.turn, ranks[line])[: halves.nbytes].view(halves.dtype)
            others[line].copy_(theirs[peers.rank * share :][:share], non_blocking=True)
        peers.barrier()
        own = halves[peers.rank * share :][:share]
        rank_sums(own, others, output, rank=peers.rank, factor=1 / peers.ranks if average else 1.0)
        peers.note_use(place.turn)

    def copy_in(self, gradients: Sequence[Tensor], ranks: int, place: _Place) -> bool:
        """Copies ``gradients``, rank by rank; returns False, and does nothing, where torch has to do it."""
        layout = tuple([(gradient.shape, gradient.dtype) for gradient in gradients])
        dtype = layout[0][1]
        reads = self._peers is not None and place.elements * dtype.itemsize <= self._peers.size
        if layout not in self._casts:
            self._casts[layout] = _scatter_cast(layout, ranks, dtype if reads else place.dtype, place)
        cast = self._casts[layout]
        if cast is None:
            return False
        flat = self._buffer_for(place, dtype) if reads else place.memory()
        # The same on all ranks, whatever the strides of their gradients.
        cast([gradient.contiguous() for gradient in gradients], flat)
        return True

    def _buffer_for(self, place: _Place, dtype: torch.dtype) -> Tensor:
        peers = self._peers
        assert peers is not None
        place.turn = peers.next_turn()
        peers.wait_for_use(place.turn)
        place.halves = peers.buffer(place.turn)[: place.elements * dtype.itemsize].view(dtype)
        return place.halves


def _scatter_cast(
    layout: Sequence[tuple[torch.Size, torch.dtype]], ranks: int, target: torch.dtype, place: _Place
) -> FlatCast | None:
    """Returns what casts gradients of these shapes; None for those that torch pads, and for dtypes that need no cast."""
    dtype = layout[0][1]
    if any(own != dtype for _, own in layout) or dtype == place.dtype or not {dtype, place.dtype} <= set(DTYPES):
        return None
    if any(len(shape) == 0 or shape[0] % ranks for shape, _ in layout):
        return None
    shares = [shape.numel() // ranks for shape, _ in layout]
    places = list(accumulate(shares, initial=0))
    pieces = [
        Piece(number, rank * share, (rank * places[-1] + start) * target.itemsize, share)
        for number, (share, start) in enumerate(zip(shares, places, strict=False))
        for rank in range(ranks)
    ]
    return FlatCast(pieces, dtype, target, place.device)


class PeerGather:
    """An all-gather, as ``FSDPModule.set_custom_all_gather`` takes it: the ranks read each other's buffers.

    Copy engines move the bytes, while NCCL's kernels would take processors and memory from the products beside them.
    """

    def __init__(self, peers: PeerBuffers) -> None:
        self.peers = peers
        """The buffers."""
        self._turn: int | None = None
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer of this rank, or other memory if the buffers are too small, or are in use."""
        self._turn = None
        size_in_bytes = math.prod(size) * dtype.itemsize
        if size_in_bytes > self.peers.size:
            return torch.empty(*size, dtype=dtype, device=device)
        turn = self.peers.next_turn()
        before = self._given.get(turn)
        if before is not None and before() is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        self._turn = turn
        self.peers.wait_for_use(turn)
        given = self.peers.buffer(turn)[:size_in_bytes].view(dtype).view(*size)
        self._given[turn] = weakref.ref(given)
        return given

    def forget_given(self) -> None:
        """Takes all buffers for unused; called after a capture that failed, whose tensors are never read."""
        self._given.clear()

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gathers the parts of all ranks; each rank has its own in its output already."""
        peers, turn = self.peers, self._turn
        if turn is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        share = input_tensor.nbytes
        whole = peers.buffer(turn)
        # A gather that the user asked for may be on another stream than those of torch.
        peers.wait_for_use()
        peers.barrier()
        for distance in range(1, peers.ranks):
            other = (peers.rank + distance) % peers.ranks
            part = slice(other * share, (other + 1) * share)
            whole[part].copy_(peers.buffer(turn, other)[part], non_blocking=True)
        peers.barrier()
        peers.note_use(turn)
        return None


class PeerMemory(NamedTuple):
    """Memory of a group's ranks for its all-gathers and reduce-scatters."""

    gather: PeerGather
    scatter: PeerBuffers


def replace_collectives(
    units: Sequence[tuple[FSDPModule, torch.dtype]], peers: PeerMemory | None, memory: ComputesMemory | None = None
) -> Callable[[], None]:
    """Replaces torch's collectives of ``units``, each with the dtype in which its parameters are gathered.

    Returns a function that makes the shards plain tensors again, without further attributes.
    """
    shards: list[Any] = []
    for unit, dtype in units:
        records = list(sharded_parameters(unit))
        for record in records:
            shard = local(record.sharded_param)
            if _is_cast_at_copy(record.sharded_param, shard, dtype):
                functions = CastShard(shard, dtype)
                shard.fsdp_pre_all_gather = functions
                shard.fsdp_post_all_gather = functions.after_gather
                shards.append(shard)
        unit.set_custom_reduce_scatter(ScatterCasts(peers and peers.scatter, memory, records))  # type: ignore[arg-type]  # no public base
        if peers is not None:
            unit.set_custom_all_gather(peers.gather)  # type: ignore[arg-type]  # no public base

    def undo() -> None:
        for shard in shards:
            vars(shard).pop("fsdp_pre_all_gather", None)
            vars(shard).pop("fsdp_post_all_gather", None)

    return undo


def _is_cast_at_copy(parameter: Any, shard: Tensor, dtype: torch.dtype) -> bool:
    is_cast = shard.dtype != dtype and shard.dtype in DTYPES
    return is_cast and shard.numel() >= _FEWEST and has_equal_shards(parameter)


def peer_memory_of(
    units: Sequence[tuple[FSDPModule, torch.dtype]], group: dist.ProcessGroup, device: torch.device
) -> PeerMemory | None:
    """Returns memory for the units' collectives; None if the ranks do not reach each other's memory, or are asked not to.

    A collective with one answer on all ranks.
    """
    if asked_exchange() == "collective":
        return None
    workspace, obstacle = workspace_of(group, device)
    if workspace is None and asked_exchange() == "peer":
        raise ConfigError(f"{VARIABLE}='peer' cannot work here: {obstacle}; use 'collective'")
    if workspace is None:
        return None
    # Padded, as all ranks have to choose alike and some may have fewer rows.
    shares = [sum(record.padded_sharded_param_size.numel() for record in sharded_parameters(unit)) for unit, _ in units]
    sizes = [share * workspace.ranks * dtype.itemsize for share, (_, dtype) in zip(shares, units, strict=True)]
    # Most units are alike; the buffers do not take the memory of a root with all embeddings, whose collectives stay torch's.
    sizes = [size for size in sizes if size <= 2 * statistics.median(sizes)]
    gather = workspace.buffers(max(sizes), _GATHERED)
    scatter = workspace.buffers(max(sizes), _SCATTERED)
    if gather is None or scatter is None:
        _LOG.warning("fsdp: no memory for buffers that the ranks read, %d bytes; NCCL gathers and scatters", max(sizes))
        return None
    return PeerMemory(PeerGather(gather), scatter)


def asked_exchange() -> str | None:
    """Returns what the environment asks for: "peer" or "collective"; None: the faster one that works."""
    return checked_exchange(os.environ.get(VARIABLE) or None, VARIABLE)


def has_equal_shards(parameter: Any) -> bool:
    """Returns whether all ranks have as many rows of ``parameter``; torch pads the shards of others."""
    if not is_shard(parameter):
        return False
    ranks = [
        parameter.device_mesh.size(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    return all(parameter.shape[0] % number == 0 for number in ranks)
