"""Slices of an update, compared one after the other where a copy of all that the update writes does not fit into memory."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from fabricamp.ops.shards import local
from fabricamp.optimizers import LARC, FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.ops.table import Table


class Row(NamedTuple):
    """A row of an update: its number in a table, and the tensors that the update writes of it."""

    table: Table
    number: int
    tensors: list[Tensor]

    @property
    def bytes(self) -> int:
        """The number of bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class UpdateSlices:
    """The rows of a fused optimizer; while a slice of them is compared, kernels skip all others, in eager steps and in replays.

    ``why_not`` says why that is impossible; it is empty if it is not.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
        parts = inner.device_rows if isinstance(inner, FusedOptimizer) else ()
        parameters = owned_parameters(inner)
        # Half weights too, which an optimizer without their copies in its rows leaves to a launch after its own.
        self._rows = [
            Row(part.table, row, [*part.written_by(row), local(module_parameter(parameters[index]))])
            for part in parts
            if part.table is not None
            for row, index in enumerate(part.indices)
        ]
        self.why_not = ""
        if not isinstance(inner, FusedOptimizer):
            self.why_not = (
                f"no part of {name}'s update can be left out of a replay; those of FusedAdam and its like can"
            )
        elif any(part.table is None for part in parts):
            self.why_not = f"no part of {name}'s update can be left out of a replay without kernels; install CuPy"

    def split(self, count: int) -> list[list[Row]]:
        """Returns the rows in ``count`` slices of about as many bytes, some of them maybe empty."""
        slices: list[list[Row]] = [[] for _ in range(count)]
        ends = list(accumulate(row.bytes for row in self._rows))
        for row, end in zip(self._rows, ends, strict=True):
            slices[min((end - row.bytes // 2) * count // max(ends[-1], 1), count - 1)].append(row)
        return slices

    @contextlib.contextmanager
    def only(self, rows: Sequence[Row]) -> Iterator[None]:
        """A context within which kernels skip all rows but these."""
        kept = {(id(row.table), row.number) for row in rows}
        held: dict[Table, list[int]] = {row.table: [] for row in self._rows}
        for row in self._rows:
            if (id(row.table), row.number) not in kept:
                held[row.table].append(row.number)
        try:
            for table, numbers in held.items():
                table.hold(numbers)
            yield
        finally:
            for table in held:
                table.hold(())
