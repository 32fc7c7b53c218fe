"""Norms and sums of squares of gradients.  A non-finite value makes a sum non-finite: one pass is norm and overflow check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from fabricamp.ops import table as tables
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.table import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.shards import SharedRows
    from fabricamp.ops.table import Table

_WIDE_OR_COMPLEX: Final = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors together (0-dim) and of each tensor (1-dim), summed and stored in fp32.

    Complex values count by their absolute value.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device="cpu"), torch.zeros(0, dtype=torch.float32, device="cpu")
    if runs_kernels(tensors[0].device):
        return table_norms(table_of(tensors))
    each = torch.stack(_norms(tensors))
    return torch.linalg.vector_norm(each), each


def table_norms(table: Table) -> tuple[Tensor, Tensor]:
    """Returns the norm of a table's full column 0 and the norm of each of its rows, in two launches."""
    partial = sum_squares(table)
    norms = torch.empty(table.rows + 1, dtype=torch.float32, device=table.device)
    each, total = norms[:-1], norms[-1]
    table.launch("statistics", "norms", partial, table.chunks, each, total, blocks=table.rows + 1)
    return total, each


@torch.no_grad()
def gradient_statistics(
    gradients: Sequence[Tensor], scale: Tensor, divisor: float = 1.0, *, shared: SharedRows | None = None
) -> Tensor:
    """Returns fp32 numbers on ``scale``'s device; their sum is the sum of squares of ``gradients / (scale * divisor)``.

    With ``shared`` the gradients are shards: the result has one number per full gradient, the same on every rank.
    """
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device=scale.device)
    if runs_kernels(gradients[0].device):
        table = table_of(gradients)
        # Not the table's own memory: the next call with these gradients would overwrite it.
        own = torch.empty(table.chunks, dtype=torch.float32, device=table.device)
        table.launch("statistics", "sum_squares", scale, divisor, own)
        return own if shared is None else _of_whole_rows(table, own, shared)
    norms = torch.stack(_norms(gradients)) * (scale * divisor).reciprocal()
    squares = norms.square_()
    return squares if shared is None else shared.reduce_(squares)


def place_of_statistic(sizes: Sequence[int], index: int, device: torch.device) -> int | None:
    """Returns the index of the gradient that entry ``index`` of :func:`gradient_statistics` belongs to.

    ``sizes``: the number of real numbers in each gradient (a complex element is two).  Returns None if there is no such entry.
    Not for ``shared`` gradients, which have one entry each.
    """
    chunk_size = (
        tables.CHUNK_SIZE if runs_kernels(device) else max([*sizes, 1])
    )  # a reference has one number per gradient
    for gradient, size in enumerate(sizes):
        index -= max(-(-size // chunk_size), 1)
        if index < 0:
            return gradient
    return None


def sum_squares(table: Table, scale: Tensor | None = None, divisor: float = 1.0) -> Tensor:
    """Returns one sum of squares of ``column 0 / (scale * divisor)`` per chunk, in the table's own memory (``partial``).

    For sharded rows it returns one sum per full row, in new memory.
    """
    table.launch("statistics", "sum_squares", scale, divisor, table.partial)
    return table.partial if table.shared is None else _of_whole_rows(table, table.partial, table.shared)


def _of_whole_rows(table: Table, partial: Tensor, shared: SharedRows) -> Tensor:
    sums = torch.empty(table.rows, dtype=torch.float32, device=table.device)
    table.launch("statistics", "row_squares", partial, sums, blocks=table.rows)
    return shared.reduce_(sums)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns one fp32 norm per tensor, in order; fp64 tensors are summed in fp64 first."""
    narrow = [tensor for tensor in tensors if tensor.dtype not in _WIDE_OR_COMPLEX]
    norms = iter(torch._foreach_norm(narrow, 2, dtype=torch.float32) if narrow else ())
    return [_norm_alone(tensor) if tensor.dtype in _WIDE_OR_COMPLEX else next(norms) for tensor in tensors]


def _norm_alone(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return _norms([torch.view_as_real(tensor.resolve_conj())])[0]
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.float()
