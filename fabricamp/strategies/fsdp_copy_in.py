"""The copies before FSDP's collectives, each by one launch: of shards that are gathered, and of gradients that are scattered.

torch casts a unit's shards into memory of their own, and copies this into the memory that it gathers.  :class:`ShardCast` stands
for the cast in between, and is made where torch copies it.
"""

from __future__ import annotations

import inspect
import operator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.flat_casts import DTYPES, FlatCast, Piece
from fabricamp.ops.shards import is_shard, local
from fabricamp.torch_private import (
    fsdp_copy_ops,
    sharded_parameters,
    tree_map_only,
    unwatched_operations,
    wrapper_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.fsdp import FSDPModule

_FEWEST: Final = 2**16
"""Elements of a shard that are worth calls of Python functions before and after each gather; torch copies smaller ones."""


class ShardCast(Tensor):
    """A shard as it is gathered, flat and in another dtype, without memory of its own.

    torch's ``fsdp.all_gather_copy_in`` casts it into the memory that is gathered, all shards of a unit by one launch on devices
    that run kernels.  Any other operation gets its :meth:`value`.

    With a ``scale``, one value in fp32, it is e4m3: ``shard`` is rounded to ``dtype`` first, then multiplied in fp32.
    """

    __torch_function__ = unwatched_operations
    shard: Tensor
    rounded: torch.dtype
    scale: Tensor | None
    plan: _CopyIn | None

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
        self._bytes = None if as_bytes else ShardCast(shard, dtype, scale, as_bytes=True)
        return self  # type: ignore[no-any-return]

    def view(self, *shape: Any) -> Tensor:
        """Returns itself for ``view(-1)`` and its bytes for ``view(torch.uint8)``, as FSDP asks for; else a view of its value."""
        if shape == (-1,):
            return self
        if shape == (torch.uint8,) and self._bytes is not None:  # type: ignore[attr-defined]
            return self._bytes  # type: ignore[attr-defined, no-any-return]
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
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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


class CastShard:
    """The functions that FSDP calls for a shard: the object itself before its gather, and :meth:`after_gather`.

    A copy of the shard has the object itself, which does nothing there: a copy is in no unit of FSDP.
    """

    def __init__(self, shard: Tensor, dtype: torch.dtype) -> None:
        self._cast = ShardCast(shard, dtype)

    def __call__(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        """Returns what is gathered, as a tuple, and None for :meth:`after_gather`."""
        return (self._cast,), None

    def __deepcopy__(self, memo: Any) -> CastShard:
        return self

    # torch asks for the signature before each gather, and deriving it would take most of the host time of this call.
    __signature__ = inspect.Signature(list(inspect.signature(__call__).parameters.values())[1:])

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Returns the gathered values, to which torch gives their shape; nothing with ``out``, which has their memory."""
        return None if out is not None else (gathered[0], ())


class FlatGradients(Tensor):
    """The memory that a unit's gradients are scattered from; torch's ``fsdp.chunk_cat`` casts them into it by one launch."""

    __torch_function__ = unwatched_operations
    memory: Tensor
    exchange: ScatterCasts

    @staticmethod
    def __new__(cls: type[Self], memory: Tensor, exchange: ScatterCasts) -> Self:
        """Returns a tensor with this ``memory``."""
        self: Any = wrapper_tensor(cls, memory.shape, memory.dtype, memory.device)
        self.memory = memory
        self.exchange = exchange
        return self  # type: ignore[no-any-return]

    def view(self, *shape: Any) -> Tensor:
        """Returns a view, which is the same memory."""
        return FlatGradients(self.memory.view(*shape), self.exchange)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operation on the memory."""
        if func is fsdp_copy_ops().chunk_cat:
            tensors, dimension, ranks = args
            flat = kwargs["out"]
            if dimension == 0 and flat.exchange.copy_in(tensors, ranks, flat.memory):
                return None
        memory = operator.attrgetter("memory")
        return func(*tree_map_only(cls, memory, args), **tree_map_only(cls, memory, kwargs or {}))


class ScatterCasts:
    """A unit's reduce-scatter, as ``FSDPModule.set_custom_reduce_scatter`` takes it: torch's, with one launch for the copies."""

    def __init__(self) -> None:
        self._is_next_the_input = True
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._cast: FlatCast | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory: torch asks for that of the input, then for that of the output, then calls the object."""
        memory = torch.empty(*size, dtype=dtype, device=device)
        if not self._is_next_the_input:
            return memory
        self._is_next_the_input = False
        return FlatGradients(memory, self)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Scatters the sums, or averages, over the ranks."""
        self._is_next_the_input = True
        memory = input_tensor.memory if isinstance(input_tensor, FlatGradients) else input_tensor
        return dist.reduce_scatter_tensor(output_tensor, memory, op=op, group=group, async_op=async_op)

    def copy_in(self, gradients: Sequence[Tensor], ranks: int, flat: Tensor) -> bool:
        """Casts ``gradients`` into ``flat``, rank by rank; returns False, and does nothing, where torch has to do it."""
        if not all(map(_is_dense, gradients)):
            return False
        layout = [(gradient.shape, gradient.dtype) for gradient in gradients]
        if layout != self._layout:
            self._layout = layout
            self._cast = _scatter_cast(layout, ranks, flat)
        if self._cast is None:
            return False
        self._cast(gradients, flat)
        return True


_is_dense: Final = Tensor.is_contiguous


def _scatter_cast(layout: Sequence[tuple[torch.Size, torch.dtype]], ranks: int, flat: Tensor) -> FlatCast | None:
    """Returns what casts gradients of these shapes; None for those that torch pads, and for dtypes that need no cast."""
    dtype = layout[0][1]
    if any(own != dtype for _, own in layout) or dtype == flat.dtype or not {dtype, flat.dtype} <= set(DTYPES):
        return None
    if any(len(shape) == 0 or shape[0] % ranks for shape, _ in layout):
        return None
    shares = [shape.numel() // ranks for shape, _ in layout]
    places = list(accumulate(shares, initial=0))
    pieces = [
        Piece(number, rank * share, (rank * places[-1] + place) * flat.element_size(), share)
        for number, (share, place) in enumerate(zip(shares, places, strict=False))
        for rank in range(ranks)
    ]
    return FlatCast(pieces, dtype, flat.dtype, flat.device)


class CopyIns:
    """The copies of all units of a module."""

    def __init__(self) -> None:
        self._shards: list[Any] = []

    def add(self, unit: FSDPModule, dtype: torch.dtype) -> None:
        """Makes the copies of ``unit``, whose parameters are gathered in ``dtype``."""
        for record in sharded_parameters(unit):
            parameter = record.sharded_param
            shard = local(parameter)
            if (
                shard.numel() >= _FEWEST
                and shard.dtype != dtype
                and shard.dtype in DTYPES
                and has_equal_shards(parameter)
            ):
                functions = CastShard(shard, dtype)
                shard.fsdp_pre_all_gather = functions
                shard.fsdp_post_all_gather = functions.after_gather
                self._shards.append(shard)
        unit.set_custom_reduce_scatter(ScatterCasts())  # type: ignore[arg-type]  # torch's base class has a private name

    def take_off(self) -> None:
        """Makes the shards plain tensors again, without further attributes."""
        for shard in self._shards:
            vars(shard).pop("fsdp_pre_all_gather", None)
            vars(shard).pop("fsdp_post_all_gather", None)
        self._shards = []


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
