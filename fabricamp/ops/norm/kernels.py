"""Launches the kernels of LayerNorm and RMSNorm, which are compiled for each row width.

:class:`Kernels` runs forward and backward of one norm; below it, each kernel is laid out and compiled once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, address_of, index_of_current, kernel
from fabricamp.ops.norm import plans
from fabricamp.ops.norm.plans import Layout, Norm, Residents, Ring
from fabricamp.torch_private import allocator

NormFunction = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]
"""A function that normalises an input: ``function(x, weight, bias)``."""

functions: Final[dict[Hashable, NormFunction]] = {}
"""Functions of earlier calls, keyed by everything they depend on: a repeated eager call skips checks, choice and layout."""

_ANY: Final = 2**31 - 1
_ONE: Final = (1,)
_COLUMN_BLOCKS: Final = 3
"""Blocks of norm_columns.cu that a multiprocessor holds."""


@functools.lru_cache(maxsize=4096)
def kernels_of(norm: Norm, shape: tuple[int, ...], over: tuple[int, ...], eps: float) -> Kernels:
    """Returns the kernels of ``norm`` for inputs of ``shape``, with weight and bias of the shape ``over``."""
    return Kernels(norm, shape, over, eps)


class Kernels:
    """The kernels of one norm over inputs of one shape, each laid out and compiled on first use.

    All tensors are contiguous, on the norm's device, and have memory of their own.  ``weight`` and ``bias`` are None if the norm
    has none.
    """

    def __init__(self, norm: Norm, shape: tuple[int, ...], over: tuple[int, ...], eps: float) -> None:
        self.norm = norm
        self.eps = eps
        self._shape = shape
        self._strides = _strides(shape)
        self._parameter_shape = over
        self._parameter_strides = _strides(over)
        rows = math.prod(shape) // norm.width
        self._rows = rows
        self._statistics = (2 * rows if norm.center else rows,)
        self._roots = 4 * rows if norm.center else 0
        """Byte offset of the roots (1 / deviation) in the statistics."""
        self._columns = norm.width * (norm.weight + norm.bias)
        """Number of columns of weight and bias; sums over each are their gradients."""
        self._input = norm.input
        self._output = norm.output
        self._empty = allocator(norm.device.type)
        self._index = norm.device.index
        self._current = index_of_current(norm.device.type)
        self._forward = functools.cache(self._lay_out_forward)
        self._backward = functools.cache(self._lay_out_backward)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns ``x`` with each row normalised, and the fp32 statistics: means (LayerNorm only), then 1 / deviation per row."""
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                return self.forward(x, weight, bias)
        output = self._empty(self._shape, self._strides, self._output)
        statistics = self._empty(self._statistics, _ONE, torch.float32)
        # An address of 0 is rare; address_of then raises an error for a tensor without memory of its own.
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
        dy = gradient.data_ptr() or address_of(gradient)
        of_saved = saved.data_ptr() or address_of(saved)
        factor = 0 if weight is None else weight.data_ptr() or address_of(weight)
        shift = 0 if bias is None else bias.data_ptr() or address_of(bias)
        means = statistics.data_ptr()
        operands = dy, of_saved, means, means + self._roots, factor, shift
        aligned = (dy | of_saved | factor | shift) % 16 == 0
        in_one_pass = self._backward(aligned, sums)
        if in_one_pass is None:
            partials, parts = self._backward_in_two_passes(operands, of_input, aligned=aligned, sums=sums)
        else:
            launch, blocks, threads, parts, size = in_one_pass
            partials = self._empty(size, _ONE, torch.float32) if sums else None
            column_sums = 0 if partials is None else partials.data_ptr()
            launch(blocks, threads, *operands, of_input.data_ptr(), column_sums, self._rows, self.eps)
        if partials is None:
            return of_input, None, None
        finish, blocks, parameter = self._finish
        of_weight = None if weight is None else self._empty(self._parameter_shape, self._parameter_strides, parameter)
        of_bias = None if bias is None else self._empty(self._parameter_shape, self._parameter_strides, parameter)
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

    def _backward_in_two_passes(
        self, operands: tuple[int, ...], of_input: Tensor, *, aligned: bool, sums: bool
    ) -> tuple[Tensor | None, int]:
        """Writes the gradient of the input in two passes; returns the partial column sums and the number of parts."""
        wide = _wide(self.norm, aligned, sums)
        rows = self._rows
        eps = self.eps
        parts = min(-(-rows // wide.columns.rows), wide.columns.parts)
        row_sums = self._empty((2 * rows,), _ONE, torch.float32)
        partials = self._empty((self._columns * parts,), _ONE, torch.float32) if sums else None
        wide.row_sums.run.launch(rows, wide.row_sums.threads, *operands, row_sums.data_ptr(), eps)
        wide.columns.run.launch(
            parts * wide.tiles, wide.columns.threads,
            *operands, row_sums.data_ptr(), of_input.data_ptr(), 0 if partials is None else partials.data_ptr(), rows, eps,
        )  # fmt: skip
        return partials, parts


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


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
    vector = plans.vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    in_registers = plans.forward_layout(norm, vector)
    file = "norm_forward" if in_registers else "norm_forward_wide"
    layout, blocks = in_registers or (plans.over(norm.width, vector), 1)
    run = kernel(file, file, (), norm.device, norm.defines(**layout.numbers(), BLOCKS=blocks))
    return Launch(run, layout.groups, layout.threads, cluster=layout.cluster)


@functools.cache
def _backward(norm: Norm, aligned: bool, sums: bool) -> Launch | None:
    """Returns the launch that computes the gradients in one pass; None if a row or its column sums do not fit."""
    plan = plans.backward(norm, aligned=aligned, sums=sums)
    if plan is None:
        return None
    layout = plan.layout
    file = "norm_backward_ring" if isinstance(plan, Ring) else "norm_backward"
    run = kernel(file, file, (), norm.device, norm.defines(**plan.numbers()), plan.shared)
    parts = _parts(run, norm.device, plan) if sums else _ANY
    return Launch(run, layout.groups, layout.threads, parts, layout.cluster)


def _parts(run: Kernel, device: torch.device, plan: Residents | Ring) -> int:
    """Returns how many blocks, or clusters of blocks, run on the device at once."""
    layout = plan.layout
    blocks = plans.processors(device) * plan.blocks
    if layout.cluster == 1:
        return blocks
    most = max(1, blocks // layout.cluster)
    resident = plans.resident_clusters(run, device, layout.cluster, layout.threads, plan.shared) or most
    # With more rows in flight the ring kernel was measured to be slower.
    return min(resident, most) if isinstance(plan, Ring) else resident


class Wide(NamedTuple):
    """Two kernels that read the same rows, one after the other."""

    row_sums: Launch
    columns: Launch
    tiles: int
    """Tiles of columns: each part of the rows has one block of ``columns`` per tile."""


@functools.cache
def _wide(norm: Norm, aligned: bool, sums: bool) -> Wide:
    vector = plans.vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    over = plans.over(norm.width, vector)
    tile = Layout(vector, 32, 1, 8)
    numbers = {**tile.numbers(), "SUMS": sums, "BLOCKS": _COLUMN_BLOCKS}
    row_sums = kernel("norm_row_sums", "norm_row_sums", (), norm.device, norm.defines(**over.numbers()))
    columns = kernel("norm_columns", "norm_columns", (), norm.device, norm.defines(**numbers))
    tiles = -(-norm.width // (32 * vector))
    parts = max(1, _COLUMN_BLOCKS * plans.processors(norm.device) // tiles)
    return Wide(Launch(row_sums, 1, over.lanes), Launch(columns, 8, 256, parts), tiles)


@functools.cache
def _finish(parameter: torch.dtype, weight: bool, bias: bool, device: torch.device) -> Kernel:
    norm = Norm(1, False, parameter, parameter, parameter, weight, bias, False, device)  # the width is an argument here
    layout = Layout(1, 32, 1, 32)
    return kernel("norm_finish", "norm_finish", (), norm.device, norm.defines(**layout.numbers()))


def forget() -> None:
    """Drops all cached kernels and layouts; for tests that replace the compiler."""
    functions.clear()
    for cached in (kernels_of, _forward, _backward, _wide, _finish):
        cached.cache_clear()
