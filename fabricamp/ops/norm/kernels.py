"""The launch of the kernels of LayerNorm and RMSNorm, compiled for each width of rows."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, address_of, kernel
from fabricamp.ops.norm import clusters
from fabricamp.ops.norm import plans as norm_plans
from fabricamp.ops.norm.plans import Layout, Norm, Residents, Ring

_ANY: Final = 2**31 - 1
_COLUMN_BLOCKS: Final = 3
"""Blocks of norm_columns.cu that a multiprocessor holds."""


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


@functools.cache
def _finish(parameter: torch.dtype, weight: bool, bias: bool, device: torch.device) -> Kernel:
    norm = Norm(1, False, parameter, parameter, parameter, weight, bias, False, device)  # the width is an argument here
    layout = Layout(1, 32, 1, 32)
    return kernel("norm_finish", "norm_finish", (), norm.device, norm.defines(**layout.numbers()))


class Kernels:
    """The kernels of one norm, each laid out and compiled when it is first needed.

    Tensors are contiguous, on its device, and in memory of their own; ``weight`` and ``bias`` are None where it has none.
    """

    def __init__(self, norm: Norm) -> None:
        self.norm = norm
        self._width = norm.width
        self._output = None if norm.output == norm.input else norm.output
        self._columns = norm.width * (norm.weight + norm.bias)
        """Sums of them are the gradients of weight and bias."""
        without_backward = norm._replace(efficient=False)  # backward alone differs
        self._forward = functools.cache(functools.partial(_forward, without_backward))
        self._backward = functools.cache(functools.partial(_backward, norm))

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Returns ``x`` with each row normalised, and what did it, fp32: means (of LayerNorm), then one over each deviation."""
        norm, rows = self.norm, x.numel() // self._width
        output = torch.empty_like(x) if self._output is None else torch.empty_like(x, dtype=self._output)
        statistics = x.new_empty(2 * rows if norm.center else rows, dtype=torch.float32)
        of_x, of_weight, of_bias = _place(x), _place(weight), _place(bias)
        means = statistics.data_ptr()
        roots = means + 4 * rows if norm.center else means
        launch = self._forward((of_x | of_weight | of_bias) % 16 == 0)
        launch.run.launch(
            -(-rows // launch.rows) * launch.cluster, launch.threads,
            of_x, of_weight, of_bias, output.data_ptr(), means, roots, rows, eps,
        )  # fmt: skip
        return output, statistics

    def backward(
        self,
        gradient: Tensor,
        saved: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        sums: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the gradients of input, weight and bias; the last two are None where there are none, or without ``sums``.

        ``saved`` is the input, or the output.  The same call gives the same bits.
        """
        norm, rows = self.norm, gradient.numel() // self._width
        of_input = torch.empty_like(saved) if self._output is None else torch.empty_like(saved, dtype=norm.input)
        above, kept, factor, shift = _place(gradient), _place(saved), _place(weight), _place(bias)
        aligned = (above | kept | factor | shift) % 16 == 0
        means = statistics.data_ptr()
        operands = above, kept, means, means + 4 * rows if norm.center else means, factor, shift
        launch = self._backward(aligned, sums)
        if launch is None:
            partials = self._read_twice(operands, of_input, rows, eps, aligned=aligned, sums=sums)
        else:
            parts = min(-(-rows // launch.rows), launch.parts)
            partials = of_input.new_empty(self._columns * parts, dtype=torch.float32) if sums else None
            blocks, summed = parts * launch.cluster, 0 if partials is None else partials.data_ptr()
            launch.run.launch(blocks, launch.threads, *operands, of_input.data_ptr(), summed, rows, eps)
        return of_input, *((None, None) if partials is None else self._finished(partials, weight, bias))

    def _finished(
        self, partials: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, from the sums."""
        of_weight = None if weight is None else torch.empty_like(weight)
        of_bias = None if bias is None else torch.empty_like(bias)
        self._finish.launch(
            -(-self._columns // 32), 1024, partials.data_ptr(),
            0 if of_weight is None else of_weight.data_ptr(), 0 if of_bias is None else of_bias.data_ptr(),
            partials.numel() // self._columns, self._width,
        )  # fmt: skip
        return of_weight, of_bias

    @functools.cached_property
    def _finish(self) -> Kernel:
        norm = self.norm
        assert norm.parameter is not None
        return _finish(norm.parameter, norm.weight, norm.bias, norm.device)

    def _read_twice(
        self, operands: tuple[int, ...], of_input: Tensor, rows: int, eps: float, *, aligned: bool, sums: bool
    ) -> Tensor | None:
        """Writes the gradient of the input; returns sums of columns over parts of the rows."""
        wide = _wide(self.norm, aligned, sums)
        parts = min(-(-rows // wide.columns.rows), wide.columns.parts)
        shares = of_input.new_empty(2 * rows, dtype=torch.float32)
        partials = of_input.new_empty(self._columns * parts, dtype=torch.float32) if sums else None
        summed, shared = 0 if partials is None else partials.data_ptr(), shares.data_ptr()
        wide.row_sums.run.launch(rows, wide.row_sums.threads, *operands, shared, eps)
        blocks = parts * wide.tiles
        wide.columns.run.launch(blocks, wide.columns.threads, *operands, shared, of_input.data_ptr(), summed, rows, eps)
        return partials


def _place(tensor: Tensor | None) -> int:
    """Where its elements are; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr() or address_of(tensor)


@functools.cache
def kernels_of(norm: Norm) -> Kernels:
    """Returns the kernels of ``norm``."""
    return Kernels(norm)


def forget() -> None:
    """Lays out and compiles anew at the next call: for those who change what compiles."""
    for cached in (kernels_of, _forward, _backward, _wide, _finish):
        cached.cache_clear()
