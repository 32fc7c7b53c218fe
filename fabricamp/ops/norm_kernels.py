"""How the kernels of LayerNorm and RMSNorm are laid out over rows of a width, and their launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import c_type, kernel

if TYPE_CHECKING:
    from fabricamp.ops.bridge import Defines, Kernel

__all__ = ["Norm", "Statistics", "backward", "forget", "forward"]

_MOST_LANES: Final = 1024
_WORDS: Final = (8, 16)
"""Registers that a thread of norm_forward.cu gives to a row; the second where the row would not fit."""

_MOST_REGISTERS: Final = 255


class Norm(NamedTuple):
    """A normalisation: of what, over how many elements, and how."""

    width: int
    center: bool
    """LayerNorm, which subtracts the mean; else RMSNorm."""
    input: torch.dtype
    output: torch.dtype
    parameter: torch.dtype | None
    """What weight and bias are made of; None where there is neither."""
    weight: bool
    bias: bool
    efficient: bool
    """Backward gets the output in place of the input."""
    device: torch.device

    def defines(self, **more: int) -> Defines:
        """Returns what the kernels are compiled with."""
        types = {"INPUT": self.input, "OUTPUT": self.output, "PARAMETER": self.parameter or torch.float32}
        types["SAVED"] = self.output if self.efficient else self.input
        flags = {"CENTER": self.center, "WEIGHT": self.weight, "BIAS": self.bias, "EFFICIENT": self.efficient}
        numbers = {"WIDTH": self.width, **flags, **more}
        return (
            *((name, str(int(number))) for name, number in numbers.items()),
            *((name, c_type(dtype)) for name, dtype in types.items()),
        )


class Statistics(NamedTuple):
    """What normalised each row, fp32: its mean (empty for RMSNorm) and one over its deviation."""

    mean: Tensor
    root: Tensor


class Launch(NamedTuple):
    """A kernel and how many rows each of its blocks takes."""

    run: Kernel
    rows: int
    threads: int
    blocks: int = 2**31 - 1
    """Blocks at most: a kernel that sums columns goes over the rows with as many as the device holds at once."""


def _vector(width: int, dtypes: tuple[torch.dtype | None, ...], *, aligned: bool) -> int:
    """How many neighbours a thread loads at once: 16 bytes of the widest dtype, fewer where they do not divide the row."""
    most = 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None) if aligned else 1
    return math.gcd(width, most)


def _words(items: int, vector: int, dtype: torch.dtype) -> int:
    """Registers for a thread's part of a row."""
    return items * max(1, vector * dtype.itemsize // 4)


def _lanes(packs: int, items: int) -> int:
    """How many threads share a row: a power of two up to a warp, then whole warps."""
    lanes = -(-packs // items)
    return 1 << max(1, (lanes - 1).bit_length()) if lanes <= 32 else -(-lanes // 32) * 32


class Layout(NamedTuple):
    """A row over threads: ``items`` loads of ``vector`` neighbours in each of ``lanes`` threads, ``groups`` rows a block."""

    vector: int
    lanes: int
    items: int
    groups: int

    def numbers(self) -> dict[str, int]:
        """Returns what the kernels are told of it."""
        return {"VECTOR": self.vector, "LANES": self.lanes, "ITEMS": self.items, "GROUPS": self.groups}


def _layout(width: int, vector: int, items: int, threads: int) -> Layout:
    """The layout with at most ``items`` loads a thread, and blocks of about ``threads``."""
    packs = width // vector
    lanes = _lanes(packs, items)
    return Layout(vector, lanes, -(-packs // lanes), max(1, threads // lanes))


@functools.cache
def _forward(norm: Norm, aligned: bool) -> Launch:
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    for words in _WORDS:
        layout = _layout(norm.width, vector, words // _words(1, vector, norm.input), 128)
        if layout.lanes <= _MOST_LANES:
            file = "norm_forward"
            break
    else:
        file, layout = "norm_forward_wide", Layout(vector, _MOST_LANES, 1, 1)
    run = kernel(file, file, (), norm.device, norm.defines(**layout.numbers()))
    return Launch(run, layout.groups, layout.lanes * layout.groups)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float) -> tuple[Tensor, Statistics]:
    """Returns ``x`` (contiguous) with each row of ``norm.width`` elements normalised, and what did it."""
    rows = x.numel() // norm.width
    output = torch.empty(x.shape, dtype=norm.output, device=x.device)
    root = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if norm.center else 0, dtype=torch.float32, device=x.device)
    launch = _forward(norm._replace(efficient=False), _aligned(x, weight, bias))  # backward alone differs
    launch.run(-(-rows // launch.rows), launch.threads, x, weight, bias, output, mean, root, rows, eps)
    return output, Statistics(mean, root)


def _aligned(*tensors: Tensor | None) -> bool:
    together = 0
    for one in tensors:
        if one is not None:
            together |= one.data_ptr()
    return together % 16 == 0


class Residents(NamedTuple):
    """A layout of norm_backward.cu, the blocks of it that a multiprocessor holds, and the bytes that they have on their way."""

    layout: Layout
    blocks: int
    ahead: bool
    bytes: int


def _residents(norm: Norm, layout: Layout, *, sums: bool, ahead: bool) -> Residents:
    part = layout.items, layout.vector
    saved = norm.output if norm.efficient else norm.input
    columns = layout.items * layout.vector * (norm.weight + norm.bias) if sums else 0
    row = _words(*part, saved) + _words(*part, norm.output)
    parameters = _words(*part, norm.parameter or norm.output) * (norm.weight + (norm.bias and norm.efficient))
    # The last two terms are what compilers were seen to need besides.
    registers = columns + row * (2 if ahead else 1) + parameters + 32 + layout.items * layout.vector * 3 // 2
    registers = -(-registers // 8) * 8
    # A quarter of a multiprocessor has 512 registers for each of a warp's threads.
    warps = 512 // registers * 4 if registers <= _MOST_REGISTERS else 0
    blocks = warps // (layout.lanes * layout.groups // 32)
    in_flight = blocks * layout.groups * norm.width * (saved.itemsize + norm.output.itemsize)
    return Residents(layout, blocks, ahead, in_flight)


def _with_sums(norm: Norm, vector: int) -> Residents | None:
    """How blocks keep the sums of columns in registers: with the most bytes on their way; None where they cannot."""
    for ahead in (True, False):
        found = [
            _residents(norm, layout, sums=True, ahead=ahead)
            for elements, threads in ((8, 256), (16, 256), (8, 512), (16, 512))
            if (layout := _layout(norm.width, vector, max(1, elements // vector), threads)).lanes <= threads
        ]
        best = max(found, key=lambda one: one.bytes, default=None)
        if best is not None and best.blocks > 0:
            return best
    return None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _backward(norm: Norm, aligned: bool, sums: bool) -> tuple[Launch, bool]:
    """The launch for the gradient of the input, and whether it makes the sums of columns too."""
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    found = _with_sums(norm, vector) if sums else None
    if found is not None:
        layout, blocks = found.layout, found.blocks
        numbers = {**layout.numbers(), "SUMS": 1, "AHEAD": found.ahead, "BLOCKS": blocks}
        run = kernel("norm_backward", "norm_backward", (), norm.device, norm.defines(**numbers))
        return Launch(run, layout.groups, layout.lanes * layout.groups, _processors(norm.device) * blocks), True
    for elements in (8, 16):
        layout = _layout(norm.width, vector, max(1, elements // vector), 128)
        if layout.lanes <= _MOST_LANES and _residents(norm, layout, sums=False, ahead=False).blocks > 0:
            file = "norm_backward"
            break
    else:
        file, layout = "norm_backward_wide", Layout(vector, _MOST_LANES // 2, 1, 1)
    numbers = {**layout.numbers(), "SUMS": 0, "AHEAD": 0, "BLOCKS": 1}
    run = kernel(file, file, (), norm.device, norm.defines(**numbers))
    return Launch(run, layout.groups, layout.lanes * layout.groups), False


@functools.cache
def _columns(norm: Norm, aligned: bool) -> tuple[Launch, int]:
    """The launch that sums columns over parts of the rows, and its tiles: each part has a block for every one of them."""
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    layout = Layout(vector, 32, 1, 8)
    tiles = -(-norm.width // (32 * vector))
    run = kernel("norm_columns", "norm_columns", (), norm.device, norm.defines(**layout.numbers()))
    return Launch(run, 8, 256, -(-4 * _processors(norm.device) // tiles)), tiles


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
    launch, whole = _backward(norm, aligned, sums)
    blocks = min(-(-rows // launch.rows), launch.blocks)
    partials = _partials(norm, blocks) if whole else None
    operands = gradient, saved, *statistics, weight, bias
    launch.run(blocks, launch.threads, *operands, of_input, partials, rows, eps)
    if not sums:
        return of_input, None, None
    if partials is None:
        summing, tiles = _columns(norm, aligned)
        blocks = min(-(-rows // summing.rows), summing.blocks)
        partials = _partials(norm, blocks)
        summing.run(blocks * tiles, summing.threads, *operands, partials, rows, eps)
    of_weight = torch.empty_like(weight) if weight is not None else None
    of_bias = torch.empty_like(bias) if bias is not None else None
    assert norm.parameter is not None
    finish = _finish(norm.parameter, norm.weight, norm.bias, norm.device)
    finish(-(-norm.width * (norm.weight + norm.bias) // 32), 1024, partials, of_weight, of_bias, blocks, norm.width)
    return of_input, of_weight, of_bias


def _partials(norm: Norm, blocks: int) -> Tensor:
    return torch.empty(blocks, norm.weight + norm.bias, norm.width, dtype=torch.float32, device=norm.device)


def forget() -> None:
    """Lays out and compiles anew at the next call: for those who change what compiles."""
    for cached in (_forward, _backward, _columns, _finish):
        cached.cache_clear()
