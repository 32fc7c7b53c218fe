"""Sharded tensors (torch's DTensors): this rank's local shard, and sums over the ranks that hold the shards of one tensor."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fabricamp.ops.extremes import INTEGERS, all_reduce_extreme
from fabricamp.ops.layouts import addresses
from fabricamp.torch_private import are_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabricamp.ops.table import Table

_WHOLE: Final = frozenset({Tensor, Parameter})
_EXTREMES: Final = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def is_shard(value: object) -> bool:
    """Whether ``value`` is a tensor of which this rank holds a shard; the check imports nothing."""
    kind = type(value)
    return kind not in _WHOLE and hasattr(kind, "to_local") and issubclass(kind, Tensor)


def any_shard(values: Iterable[object]) -> bool:
    """Whether any of ``values`` is a sharded tensor; makes one check per type, not one per value."""
    return any(hasattr(kind, "to_local") and issubclass(kind, Tensor) for kind in set(map(type, values)) - _WHOLE)


def local(tensor: Any) -> Any:
    """Returns this rank's local shard of ``tensor``, the same object in each call; returns any other value unchanged."""
    return tensor._local_tensor if is_shard(tensor) else tensor


def first_element(tensor: Any) -> int:
    """Returns the number, in the whole tensor, of the first element of this rank's shard; -1 if the shard is no such range."""
    if not is_shard(tensor):
        return 0
    first = 0
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(dimension) == 1:
            continue
        if first or type(placement).__name__ != "Shard" or placement.dim != 0:
            return -1
        rows: int = tensor.shape[0]
        each = -(-rows // tensor.device_mesh.size(dimension))
        first = min(each * tensor.device_mesh.get_local_rank(dimension), rows) * (tensor.numel() // max(rows, 1))
    return first


def shards_of(tensor: Any) -> int:
    """Returns the number of shards of ``tensor`` along its first dimension; 1 if it is whole on this rank."""
    if not is_shard(tensor):
        return 1
    sizes = [tensor.device_mesh.size(dimension) for dimension in range(tensor.device_mesh.ndim)]
    pairs = zip(tensor.placements, sizes, strict=True)
    return math.prod([size for placement, size in pairs if not placement.is_replicate()])


class MemoryOf:
    """Where tensors are now; of sharded ones, where this rank's shards are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._has_shards = any_shard(self._tensors)
        self._positions = list(range(len(self._tensors)))
        self._addresses = addresses(self._present())

    def is_unchanged(self) -> bool:
        """Whether every tensor is still there."""
        return are_at(self._present(), self._addresses, self._positions)

    def _present(self) -> list[Tensor]:
        return list(map(local, self._tensors)) if self._has_shards else self._tensors


def device_of(tensor: Any) -> torch.device:
    """Returns the device that computes with ``tensor``: its own, or that of its mesh if the shards are offloaded to the CPU."""
    own: torch.device = tensor.device
    if own.type == "cpu" and is_shard(tensor) and tensor.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return own


def whole(tensor: Any) -> Tensor:
    """Returns the full tensor of a sharded ``tensor``, on the device of :func:`device_of`; a collective of all ranks.

    Gathers over one dimension of the mesh after the other, because torch warns about several at once.
    """
    from torch.distributed.tensor import Replicate

    gathered = tensor.to(device_of(tensor))
    placements = list(tensor.placements)
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        placements[dimension] = Replicate()
        if gathered.is_floating_point() and getattr(placement, "reduce_op", "") in _EXTREMES:
            gathered = _with_extremes(gathered, dimension, placements)
        else:
            gathered = gathered.redistribute(placements=placements)
    full: Tensor = gathered.to_local()
    return full


def _with_extremes(tensor: Any, dimension: int, placements: Sequence[Any]) -> Any:
    """Returns ``tensor`` with ``placements``, its largest or smallest values over a dimension of the mesh; keeps nan."""
    from torch.distributed.tensor import DTensor

    mesh = tensor.device_mesh
    operation = _EXTREMES[tensor.placements[dimension].reduce_op]
    reduced = all_reduce_extreme(tensor.to_local(), operation, mesh.get_group(dimension))
    return DTensor.from_local(reduced, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def norm_of(tensor: Tensor, order: float) -> Tensor:
    """Returns the norm of the full tensor, where it lies; a collective of all ranks if ``tensor`` is sharded."""
    if is_shard(tensor) and math.isinf(order):
        return whole(_extreme_of(tensor, order))
    norm: Tensor = torch.linalg.vector_norm(tensor, order)
    return whole(norm) if is_shard(norm) else norm


def _extreme_of(tensor: Any, order: float) -> Any:
    """Returns the norm of order inf or -inf of a sharded ``tensor``, still to be reduced over the mesh."""
    from torch.distributed.tensor import DTensor, Partial

    part, over = tensor.to_local(), Partial("max" if order > 0 else "min")
    if part.numel() > 0:
        norm = torch.linalg.vector_norm(part, order)
    else:  # torch has no such norm without elements
        norm = part.abs().new_full((), 0.0 if order > 0 else math.inf)
    placements = [placement if placement.is_replicate() else over for placement in tensor.placements]
    return DTensor.from_local(norm, tensor.device_mesh, placements, run_check=False)


def local_gradient(parameter: Any) -> Any:
    """Returns this rank's shard of a parameter's ``.grad`` (maybe without elements), or None if the parameter has no gradient."""
    gradient = parameter.grad
    return getattr(gradient, "_local_tensor", gradient)


class Members(NamedTuple):
    """The rows that a process group shards: each of its ranks has a shard of each row.  ``device``: that of its collectives."""

    group: Callable[[], dist.ProcessGroup | None]
    device: torch.device
    rows: list[int]


class SharedRows:
    """Reduces per-row numbers over the ranks that hold shards of the row's parameter.

    The order of ``members`` is the same on all ranks.  No process group is kept alive.
    """

    def __init__(self, members: Sequence[Members], rows: int) -> None:
        self._members = members
        self._rows = rows
        self._indices: dict[int, Tensor] = {}
        self._sums: Tensor | None = None

    @classmethod
    def of(cls, parameters: Sequence[Any]) -> SharedRows | None:
        """Returns the rows of these parameters, or None if none is sharded.  Replicas (HSDP) are not reduced with each other."""
        members: dict[dist.ProcessGroup, Members] = {}
        for row, parameter in enumerate(parameters):
            for dimension, placement in enumerate(parameter.placements if is_shard(parameter) else ()):
                if not placement.is_replicate() and parameter.device_mesh.size(dimension) > 1:
                    group = parameter.device_mesh.get_group(dimension)
                    members.setdefault(group, Members(weakref.ref(group), device_of(parameter), [])).rows.append(row)
        return cls(list(members.values()), len(parameters)) if members else None

    def chosen(self, rows: Sequence[int]) -> SharedRows:
        """Returns the given rows, renumbered from 0."""
        numbers = {row: number for number, row in enumerate(rows)}
        members = [
            member._replace(rows=[numbers[row] for row in member.rows if row in numbers]) for member in self._members
        ]
        return SharedRows(members, len(rows))

    def reduce_(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Replaces each row of ``numbers`` by the sum (or another ``operation``) over its ranks; a collective of all ranks."""
        for number, (group, device, rows) in enumerate(self._members):
            ranks = group()
            assert ranks is not None, "the process group of these rows has ended with its run"
            every_row = len(rows) == self._rows
            part = numbers if every_row else numbers.index_select(0, self._indices_of(number, numbers.device))
            reduced = part.to(device)  # from host memory if the shards are offloaded to it
            if rows:
                dist.all_reduce(reduced, operation, ranks)
            if not every_row:
                numbers.index_copy_(0, self._indices_of(number, numbers.device), reduced.to(numbers.device))
            elif reduced is not numbers:
                numbers.copy_(reduced)
        return numbers

    def _indices_of(self, number: int, device: torch.device) -> Tensor:
        """Returns the rows of member ``number`` as a tensor, made once."""
        indices = self._indices.get(number)
        if indices is None:
            indices = torch.tensor(self._members[number].rows, dtype=torch.int64, device=device)
            self._indices[number] = indices
        return indices

    def norms(self, parts: Tensor) -> Tensor:
        """Returns the norms of full rows, from the norms of this rank's shards (``parts``)."""
        return self.reduce_(parts.square()).sqrt_()

    def largest(self, parts: Tensor) -> Tensor:
        """Returns the largest values of full rows, from those of this rank's shards (``parts``, not negative); keeps nan.

        Without a sign, the bits of floats have the order of the floats as integers, in which nan is the largest.
        """
        bits = parts.abs().view(INTEGERS[parts.dtype])
        return self.reduce_(bits, dist.ReduceOp.MAX).view(parts.dtype)

    def memory(self, each: int, device: torch.device) -> Tensor:
        """Returns memory for ``each`` fp64 numbers per row, valid until the next call."""
        if self._sums is None or self._sums.numel() < each * self._rows:
            self._sums = torch.empty(each * self._rows, dtype=torch.float64, device=device)
        return self._sums[: each * self._rows]


def whole_sums(table: Table, numbers: Tensor, each: int) -> Tensor | None:
    """Returns the sums of full rows, ``each`` per row, or None if no row is sharded.  ``numbers`` has ``each`` per chunk."""
    shared = table.shared
    if shared is None:
        return None
    sums = shared.memory(each, table.device)
    table.launch("statistics", "row_sums", numbers, each, sums, blocks=table.rows)
    return shared.reduce_(sums.view(table.rows, each))
