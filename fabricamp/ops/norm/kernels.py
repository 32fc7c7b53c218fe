"""The launch of the kernels of LayerNorm and RMSNorm, compiled for each width of rows."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, kernel
from fabricamp.ops.norm import clusters
from fabricamp.ops.norm import plans as norm_plans
from fabricamp.ops.norm.plans import Layout, Norm, Residents, Ring

_ANY: Final = 2**31 - 1
_COLUMN_BLOCKS: Final = 3
"""Blocks of norm_columns.cu that a multiprocessor holds."""


class Statistics(NamedTuple):
    """What normalised each row, fp32: its mean (empty for RMSNorm) and one over its deviation."""

    mean: Tensor
    root: Tensor


class Launch(NamedTuple):
    """A kernel and how many rows each of its parts takes: a block, or the ``cluster`` of them that shares a row."""

    run: Kernel
    rows: int
    threads: int
    parts: int = _ANY
    """At most: a kernel that sums columns goes over the rows with as many as the device holds at once."""
    cluster: int = 1


@functools.cache
def _forward(norm: Norm, aligned: bool) -> Launch:
    vector = norm_plans.vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    found = norm_plans.forward_layout(norm, vector)
    file = "norm_forward" if found else "norm_forward_wide"
    layout, blocks = found or (norm_plans.over(norm.width, vector), 1)
    run = kernel(file, file, (), norm.device, norm.defines(**layout.numbers(), BLOCKS=blocks))
    return Launch(run, layout.groups, layout.threads, cluster=layout.cluster)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float) -> tuple[Tensor, Statistics]:
    """Returns ``x`` (contiguous) with each row of ``norm.width`` elements normalised, and what did it."""
    rows = x.numel() // norm.width
    output = torch.empty(x.shape, dtype=norm.output, device=x.device)
    root = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if norm.center else 0, dtype=torch.float32, device=x.device)
    launch = _forward(norm._replace(efficient=False), _aligned(x, weight, bias))  # backward alone differs
    launch.run(-(-rows // launch.rows) * launch.cluster, launch.threads, x, weight, bias, output, mean, root, rows, eps)
    return output, Statistics(mean, root)


def _aligned(*tensors: Tensor | None) -> bool:
    together = 0
    for one in tensors:
        if one is not None:
            together |= one.data_ptr()
    return together % 16 == 0


@functools.cache
def _backward(norm: Norm, aligned: bool, sums: bool) -> Launch | None:
    """What makes the gradients in one reading; None where a row, or the sums that go with it, do not fit."""
    found = norm_plans.backward(norm, aligned=aligned, sums=sums)
    if found is None:
        return None
    layout, defines = found.layout, norm.defines(**found.numbers())
    file = "norm_backward_ring" if isinstance(found, Ring) else "norm_backward"
    run = kernel(file, file, (), norm.device, defines, found.shared)
    parts = _parts(run, norm.device, found) if sums else _ANY
    return Launch(run, layout.groups, layout.threads, parts, layout.cluster)


def _parts(run: Kernel, device: torch.device, found: Residents | Ring) -> int:
    """How many blocks, or clusters of them, a device is to have at once."""
    layout, blocks = found.layout, norm_plans.processors(device) * found.blocks
    if layout.cluster == 1:
        return blocks
    most = max(1, blocks // layout.cluster)
    resident = clusters.resident(run, device, layout.cluster, layout.threads, found.shared) or most
    # With more rows of a ring on their way it was seen to take longer.
    return min(resident, most) if isinstance(found, Ring) else resident


class Wide(NamedTuple):
    """Two kernels that read the same rows, one after the other."""

    row_sums: Launch
    columns: Launch
    tiles: int
    """Each part of the rows has a block of ``columns`` for every one of them."""


@functools.cache
def _wide(norm: Norm, aligned: bool, sums: bool) -> Wide:
    vector = norm_plans.vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    over, tile = norm_plans.over(norm.width, vector), Layout(vector, 32, 1, 8)
    numbers = {**tile.numbers(), "SUMS": sums, "BLOCKS": _COLUMN_BLOCKS}
    row_sums = kernel("norm_row_sums", "norm_row_sums", (), norm.device, norm.defines(**over.numbers()))
    columns = kernel("norm_columns", "norm_columns", (), norm.device, norm.defines(**numbers))
    tiles = -(-norm.width // (32 * vector))
    parts = max(1, _COLUMN_BLOCKS * norm_plans.processors(norm.device) // tiles)
    return Wide(Launch(row_sums, 1, over.lanes), Launch(columns, 8, 256, parts), tiles)


def _read_twice(
    operands: tuple[Tensor | None, ...], of_input: Tensor, norm: Norm, eps: float, *, aligned: bool, sums: bool
) -> Tensor | None:
    """Writes the gradient of the input; returns sums of columns over parts of the rows."""
    wide = _wide(norm, aligned, sums)
    rows = of_input.numel() // norm.width
    parts = min(-(-rows // wide.columns.rows), wide.columns.parts)
    shares = torch.empty(rows, 2, dtype=torch.float32, device=norm.device)
    partials = _partials(norm, parts) if sums else None
    wide.row_sums.run(rows, wide.row_sums.threads, *operands, shares, eps)
    wide.columns.run(parts * wide.tiles, wide.columns.threads, *operands, shares, of_input, partials, rows, eps)
    return partials


@functools.cache
def _finish(parameter: torch.dtype, weight: bool, bias: bool, device: torch.device) -> Kernel:
    norm = Norm(1, False, parameter, parameter, parameter, weight, bias, False, device)  # the width is an argument here
    layout = Layout(1, 32, 1, 32)
    return kernel("norm_finish", "norm_finish", (), norm.device, norm.defines(**layout.numbers()))


def backward(
    gradient: Tensor,
    saved: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    *,
    sums: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias; the last two are None where there are none, or without ``sums``.

    ``gradient`` and ``saved`` (the input, or the output) are contiguous.  The same call gives the same bits.
    """
    rows = gradient.numel() // norm.width
    of_input = torch.empty(saved.shape, dtype=norm.input, device=saved.device)
    aligned = _aligned(gradient, saved, weight, bias)
    operands = gradient, saved, *statistics, weight, bias
    launch = _backward(norm, aligned, sums)
    if launch is None:
        partials = _read_twice(operands, of_input, norm, eps, aligned=aligned, sums=sums)
    else:
        parts = min(-(-rows // launch.rows), launch.parts)
        partials = _partials(norm, parts) if sums else None
        launch.run(parts * launch.cluster, launch.threads, *operands, of_input, partials, rows, eps)
    if partials is None:
        return of_input, None, None
    of_weight = torch.empty_like(weight) if weight is not None else None
    of_bias = torch.empty_like(bias) if bias is not None else None
    assert norm.parameter is not None
    finish = _finish(norm.parameter, norm.weight, norm.bias, norm.device)
    finish(
        -(-norm.width * (norm.weight + norm.bias) // 32), 1024, partials, of_weight, of_bias, len(partials), norm.width
    )
    return of_input, of_weight, of_bias


def _partials(norm: Norm, parts: int) -> Tensor:
    return torch.empty(parts, norm.weight + norm.bias, norm.width, dtype=torch.float32, device=norm.device)


def forget() -> None:
    """Lays out and compiles anew at the next call: for those who change what compiles."""
    for cached in (_forward, _backward, _wide, _finish):
        cached.cache_clear()
