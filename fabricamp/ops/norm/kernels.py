"""Launches the kernels of LayerNorm and RMSNorm, which are compiled for each row width."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, address_of, index_of_current, kernel
from fabricamp.ops.norm import plans
from fabricamp.ops.norm import plans as norm_plans
from fabricamp.ops.norm.plans import Layout, Norm, Residents, Ring
from fabricamp.torch_private import allocator

Way = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]
"""A function that normalises an input: ``way(x, weight, bias)``."""

ways: Final[dict[Hashable, Way]] = {}
"""Ways of earlier calls, keyed by everything they depend on: a repeated eager call skips checks, choice and layout."""

_ANY: Final = 2**31 - 1
_ONE: Final = (1,)
_COLUMN_BLOCKS: Final = 3
"""Blocks of norm_columns.cu that a multiprocessor holds."""


class Launch(NamedTuple):
    """A kernel; each part of it (a block, or the ``cluster`` blocks that share a row) works on ``rows`` rows at once."""

    run: Kernel
    rows: int
    threads: int
    parts: int = _ANY
    """Most parts of a launch: a kernel that sums columns loops over the rows with as many parts as the device holds at once."""
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
    """Returns the launch that computes the gradients in one pass; None if a row or its column sums do not fit."""
    found = norm_plans.backward(norm, aligned=aligned, sums=sums)
    if found is None:
        return None
    layout, defines = found.layout, norm.defines(**found.numbers())
    file = "norm_backward_ring" if isinstance(found, Ring) else "norm_backward"
    run = kernel(file, file, (), norm.device, defines, found.shared)
    parts = _parts(run, norm.device, found) if sums else _ANY
    return Launch(run, layout.groups, layout.threads, parts, layout.cluster)


def _parts(run: Kernel, device: torch.device, found: Residents | Ring) -> int:
    """Returns how many blocks, or clusters of blocks, run on the device at once."""
    layout, blocks = found.layout, norm_plans.processors(device) * found.blocks
    if layout.cluster == 1:
        return blocks
    most = max(1, blocks // layout.cluster)
    resident = plans.resident(run, device, layout.cluster, layout.threads, found.shared) or most
    # With more rows in flight the ring kernel was measured to be slower.
    return min(resident, most) if isinstance(found, Ring) else resident


class Wide(NamedTuple):
    """Two kernels that read the same rows, one after the other."""

    row_sums: Launch
    columns: Launch
    tiles: int
    """Tiles of columns: each part of the rows has one block of ``columns`` per tile."""


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
    """The kernels of one norm over inputs of one shape, each laid out and compiled on first use.

    All tensors are contiguous, on the norm's device, and have memory of their own.  ``weight`` and ``bias`` are None if the norm
    has none.
    """

    def __init__(self, norm: Norm, shape: tuple[int, ...], over: tuple[int, ...], eps: float) -> None:
        self.norm, self.eps = norm, eps
        self._shape, self._strides = shape, _strides(shape)
        self._over, self._steps = over, _strides(over)
        """Shape and strides of weight and bias."""
        self._rows = rows = math.prod(shape) // norm.width
        self._statistics = (2 * rows if norm.center else rows,)
        self._roots = 4 * rows if norm.center else 0
        """Byte offset of the roots (1 / deviation) in the statistics."""
        self._columns = norm.width * (norm.weight + norm.bias)
        """Number of columns of weight and bias; sums over each are their gradients."""
        self._input, self._output = norm.input, norm.output
        self._empty = allocator(norm.device.type)
        self._index, self._current = norm.device.index, index_of_current(norm.device.type)
        self._forward = functools.cache(self._lay_out_forward)
        self._backward = functools.cache(self._lay_out_backward)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns ``x`` with each row normalised, and the fp32 statistics: means (LayerNorm only), then 1 / deviation per row."""
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                return self.forward(x, weight, bias)
        output = self._empty(self._shape, self._strides, self._output)
        statistics = self._empty(self._statistics, _ONE, torch.float32)
        of_x = x.data_ptr() or address_of(x)
        of_weight = 0 if weight is None else weight.data_ptr() or address_of(weight)
        of_bias = 0 if bias is None else bias.data_ptr() or address_of(bias)
        means = statistics.data_ptr()
        launch, blocks, threads = self._forward((of_x | of_weight | of_bias) % 16 == 0)
        launch(
            blocks, threads,
            of_x, of_weight, of_bias, output.data_ptr(), means, means + self._roots, self._rows, self.eps,
        )  # fmt: skip
        return output, statistics

    def backward(
        self,
        gradient: Tensor,
        saved: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the gradients of input, weight and bias; None for a missing weight or bias, or without ``sums``.

        ``saved`` is the input, or the output if the norm is memory-efficient.  The same call gives the same bits.
        """
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                return self.backward(gradient, saved, statistics, weight, bias, sums)
        of_input = self._empty(self._shape, self._strides, self._input)
        above, kept = gradient.data_ptr() or address_of(gradient), saved.data_ptr() or address_of(saved)
        factor = 0 if weight is None else weight.data_ptr() or address_of(weight)
        shift = 0 if bias is None else bias.data_ptr() or address_of(bias)
        means = statistics.data_ptr()
        operands = above, kept, means, means + self._roots, factor, shift
        aligned = (above | kept | factor | shift) % 16 == 0
        found = self._backward(aligned, sums)
        if found is None:
            partials, parts = self._read_twice(operands, of_input, aligned=aligned, sums=sums)
        else:
            launch, blocks, threads, parts, size = found
            partials = self._empty(size, _ONE, torch.float32) if sums else None
            summed = 0 if partials is None else partials.data_ptr()
            launch(blocks, threads, *operands, of_input.data_ptr(), summed, self._rows, self.eps)
        if partials is None:
            return of_input, None, None
        finish, blocks, parameter = self._finish
        of_weight = None if weight is None else self._empty(self._over, self._steps, parameter)
        of_bias = None if bias is None else self._empty(self._over, self._steps, parameter)
        finish(
            blocks, 1024, partials.data_ptr(),
            0 if of_weight is None else of_weight.data_ptr(), 0 if of_bias is None else of_bias.data_ptr(),
            parts, self.norm.width,
        )  # fmt: skip
        return of_input, of_weight, of_bias

    def _lay_out_forward(self, aligned: bool) -> tuple[Callable[..., None], int, int]:
        launch = _forward(self.norm._replace(efficient=False), aligned)  # only backward differs
        return launch.run.launch, -(-self._rows // launch.rows) * launch.cluster, launch.threads

    def _lay_out_backward(
        self, aligned: bool, sums: bool
    ) -> tuple[Callable[..., None], int, int, int, tuple[int, ...]] | None:
        """Returns launch, blocks, threads, the number of parts that sum columns, and the size of their partial sums; or None."""
        launch = _backward(self.norm, aligned, sums)
        if launch is None:
            return None
        parts = min(-(-self._rows // launch.rows), launch.parts)
        return launch.run.launch, parts * launch.cluster, launch.threads, parts, (self._columns * parts,)

    @functools.cached_property
    def _finish(self) -> tuple[Callable[..., None], int, torch.dtype]:
        """The launch that adds the partial sums to the gradients of weight and bias, its blocks, and the gradients' dtype."""
        norm = self.norm
        assert norm.parameter is not None
        kernel = _finish(norm.parameter, norm.weight, norm.bias, norm.device)
        return kernel.launch, -(-self._columns // 32), norm.parameter

    def _read_twice(
        self, operands: tuple[int, ...], of_input: Tensor, *, aligned: bool, sums: bool
    ) -> tuple[Tensor | None, int]:
        """Writes the gradient of the input in two passes; returns the partial column sums and the number of parts."""
        wide, rows, eps = _wide(self.norm, aligned, sums), self._rows, self.eps
        parts = min(-(-rows // wide.columns.rows), wide.columns.parts)
        shares = self._empty((2 * rows,), _ONE, torch.float32)
        partials = self._empty((self._columns * parts,), _ONE, torch.float32) if sums else None
        summed, shared = 0 if partials is None else partials.data_ptr(), shares.data_ptr()
        wide.row_sums.run.launch(rows, wide.row_sums.threads, *operands, shared, eps)
        blocks = parts * wide.tiles
        wide.columns.run.launch(blocks, wide.columns.threads, *operands, shared, of_input.data_ptr(), summed, rows, eps)
        return partials, parts


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def kernels_of(norm: Norm, shape: tuple[int, ...], over: tuple[int, ...], eps: float) -> Kernels:
    """Returns the kernels of ``norm`` for inputs of ``shape``, with weight and bias of the shape ``over``."""
    return Kernels(norm, shape, over, eps)


def forget() -> None:
    """Drops all cached kernels and layouts; for tests that replace the compiler."""
    ways.clear()
    for cached in (kernels_of, _forward, _backward, _wide, _finish):
        cached.cache_clear()
