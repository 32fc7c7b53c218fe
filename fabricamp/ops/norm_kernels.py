"""How the kernels of LayerNorm and RMSNorm are laid out over rows of a width, and their launch."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops import clusters
from fabricamp.ops.bridge import c_type, kernel

if TYPE_CHECKING:
    from fabricamp.ops.bridge import Defines, Kernel

__all__ = ["Norm", "Statistics", "backward", "forget", "forward"]

_ANY: Final = 2**31 - 1
_MOST_LANES: Final = 1024
_FORWARD_LANES: Final = 256
_WORDS: Final = {8: 1280, 16: 1024, 32: 512}
"""Registers that a thread of norm_forward.cu gives to a row, the next where the row would not fit into ``_FORWARD_LANES``
threads; and the threads that a multiprocessor is to hold then: 40 KB or more are on their way so."""

_MOST_REGISTERS: Final = 255
_COLUMN_BLOCKS: Final = 3
"""Blocks of norm_columns.cu that a multiprocessor holds."""

_SHARED_ELEMENTS: Final = 32
_SHARED_VECTOR: Final = 4
_SHARED_LANES: Final = (128, 512)
"""Where the sums of columns are in shared memory: elements of a row that a thread has, neighbours that it loads at least, and
how many threads have a row."""

_SHARED_FROM: Final = {2: 8192, 4: 12288}
_SLICE: Final = 2048
"""Elements of a row, by the bytes of one, from which blocks of norm_backward.cu share it; and of each slice, where 8 are enough."""

_OF_A_ROW: Final = ((8, 256), (16, 256), (8, 512), (16, 512))
_OF_A_SLICE: Final = {2: ((16, 512),), 4: ((8, 512), (16, 512))}
"""With sums in registers: a thread's elements and the most threads.  The most bytes on their way decide, of a slice the first that
fits, by the bytes of an element, as was measured."""

_OWN_SHARED: Final = 1024 + 512
"""Bytes of shared memory that a block takes besides: the system's, and those of its sums over a row."""


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
    """A kernel and how many rows each of its parts takes: a block, or the ``cluster`` of them that shares a row."""

    run: Kernel
    rows: int
    threads: int
    parts: int = _ANY
    """At most: a kernel that sums columns goes over the rows with as many as the device holds at once."""
    cluster: int = 1


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
    """A row over threads: ``items`` loads of ``vector`` neighbours in each of ``lanes`` threads, ``groups`` rows a block.

    Or a row over ``cluster`` blocks of one group, each with an equal slice.
    """

    vector: int
    lanes: int
    items: int
    groups: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Those of a block."""
        return self.lanes * self.groups

    @property
    def elements(self) -> int:
        """Those that the threads of a row have room for, in one block."""
        return self.vector * self.lanes * self.items

    def numbers(self) -> dict[str, int]:
        """Returns what the kernels are told of it."""
        return {name.upper(): number for name, number in self._asdict().items()}


def _layout(width: int, vector: int, items: int, threads: int, cluster: int = 1) -> Layout:
    """The layout with at most ``items`` loads a thread, and blocks of about ``threads``, or of one slice of a row."""
    packs = width // cluster // vector
    lanes = _lanes(packs, items) if cluster == 1 else max(32, _lanes(packs, items))
    return Layout(vector, lanes, -(-packs // lanes), max(1, threads // lanes) if cluster == 1 else 1, cluster)


def _clusters(norm: Norm, vector: int) -> list[int]:
    """How many blocks may share a row, in equal slices; the fewest first."""
    return [one for one in clusters.sizes(norm.device) if norm.width % (one * vector) == 0]


def _over(width: int, vector: int, lanes: int) -> Layout:
    """A row that is read over and over by a whole block."""
    return Layout(vector, lanes, -(-width // (vector * lanes)), 1)


@functools.cache
def _forward(norm: Norm, aligned: bool) -> Launch:
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    found = _forward_layout(norm, vector)
    file = "norm_forward" if found else "norm_forward_wide"
    layout, blocks = found or (_over(norm.width, vector, _MOST_LANES), 1)
    run = kernel(file, file, (), norm.device, norm.defines(**layout.numbers(), BLOCKS=blocks))
    return Launch(run, layout.groups, layout.threads, cluster=layout.cluster)


def _forward_layout(norm: Norm, vector: int) -> tuple[Layout, int] | None:
    """A layout that holds a row in registers, with the fewest blocks to a row, and how many of them a multiprocessor holds."""
    for cluster in _clusters(norm, vector):
        for words, threads in _WORDS.items():
            layout = _layout(norm.width, vector, words // _words(1, vector, norm.input), 128, cluster)
            if layout.lanes <= _FORWARD_LANES:
                return layout, threads // layout.threads
    return None


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


_IN_REGISTERS, _IN_SHARED_MEMORY = 1, 2
"""Where a block of norm_backward.cu keeps its sums of columns; 0 where it has none."""


class Residents(NamedTuple):
    """A layout of norm_backward.cu, the blocks of it that a multiprocessor holds, and the bytes that they have on their way."""

    layout: Layout
    sums: int
    ahead: bool
    blocks: int
    bytes: int
    shared: int
    """Dynamic shared memory of a block, in bytes."""

    def numbers(self) -> dict[str, int]:
        """Returns what the kernel is told of it."""
        return {**self.layout.numbers(), "SUMS": self.sums, "AHEAD": self.ahead, "BLOCKS": max(1, self.blocks)}


def _registers(norm: Norm, layout: Layout, sums: int, ahead: bool) -> int:
    """What a thread of norm_backward.cu needs; the constants are what compilers were seen to need besides."""
    part, elements = (layout.items, layout.vector), layout.items * layout.vector
    saved = norm.output if norm.efficient else norm.input
    rows = (_words(*part, saved) + _words(*part, norm.output)) * (2 if ahead else 1)
    if sums == _IN_SHARED_MEMORY:
        return rows + (56 if layout.elements * layout.cluster == norm.width else 90)
    columns = elements * (norm.weight + norm.bias) if sums else 0
    parameters = _words(*part, norm.parameter or norm.output) * (norm.weight + (norm.bias and norm.efficient))
    return columns + rows + parameters + 32 + elements * 3 // 2


def _residents(norm: Norm, layout: Layout, sums: int, *, ahead: bool) -> Residents:
    registers = -(-_registers(norm, layout, sums, ahead) // 8) * 8
    # A quarter of a multiprocessor has 512 registers for each of a warp's threads.
    warps = 512 // registers * 4 if registers <= _MOST_REGISTERS else 0
    blocks = warps // (layout.threads // 32)
    shared = 0
    if sums == _IN_SHARED_MEMORY:
        shared = layout.elements * (norm.weight + norm.bias) * 4
        blocks = min(blocks, _shared_memory(norm.device) // (shared + _OWN_SHARED))
    saved = norm.output if norm.efficient else norm.input
    in_flight = blocks * layout.groups * norm.width // layout.cluster * (saved.itemsize + norm.output.itemsize)
    return Residents(layout, sums, ahead, blocks, in_flight, shared)


def _with_sums(norm: Norm, vector: int) -> Residents | None:
    """How blocks keep the sums of columns beside their rows; None where they cannot."""
    cluster = _cluster(norm, vector)
    ways = _OF_A_ROW if cluster == 1 else _OF_A_SLICE[norm.input.itemsize]
    for ahead in (True, False):
        found = [
            _residents(norm, layout, _IN_REGISTERS, ahead=ahead)
            for elements, threads in ways
            if (layout := _layout(norm.width, vector, max(1, elements // vector), threads, cluster)).lanes <= threads
        ]
        wide = _layout(norm.width, vector, _SHARED_ELEMENTS // vector, 1, cluster)
        if vector >= _SHARED_VECTOR and _SHARED_LANES[0] <= wide.lanes <= _SHARED_LANES[1]:
            found.append(_residents(norm, wide, _IN_SHARED_MEMORY, ahead=ahead))
        if able := [one for one in found if one.blocks > 0]:
            return able[0] if cluster > 1 else max(able, key=lambda one: one.bytes)
    return None


def _cluster(norm: Norm, vector: int) -> int:
    """How many blocks share a row where they sum columns."""
    able = _clusters(norm, vector)
    if norm.width < _SHARED_FROM[norm.input.itemsize]:
        return able[0]
    return next((one for one in able if norm.width // one <= _SLICE), able[-1])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 2**17


@functools.cache
def _backward(norm: Norm, aligned: bool, sums: bool) -> Launch | None:
    """The launch of norm_backward.cu; None where a row, or the sums that go with it, do not fit."""
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    found = _with_sums(norm, vector) if sums else _without_sums(norm, vector)
    if found is None:
        return None
    layout, defines = found.layout, norm.defines(**found.numbers())
    run = kernel("norm_backward", "norm_backward", (), norm.device, defines, found.shared)
    parts = _parts(run, norm.device, found) if sums else _ANY
    return Launch(run, layout.groups, layout.threads, parts, layout.cluster)


def _parts(run: Kernel, device: torch.device, found: Residents) -> int:
    """How many blocks, or clusters of them, a device holds at once."""
    layout, most = found.layout, _processors(device) * found.blocks
    if layout.cluster == 1:
        return most
    return clusters.resident(run, device, layout.cluster, layout.threads, found.shared) or max(
        1, most // layout.cluster
    )


def _without_sums(norm: Norm, vector: int) -> Residents | None:
    for most in (_MOST_LANES // 2, _MOST_LANES):  # of the most lanes few have registers enough
        for cluster, elements in itertools.product(_clusters(norm, vector), (8, 16)):
            layout = _layout(norm.width, vector, max(1, elements // vector), 128, cluster)
            found = _residents(norm, layout, 0, ahead=False)
            if layout.lanes <= most and found.blocks > 0:
                return found._replace(blocks=1)
    return None


class Wide(NamedTuple):
    """Two kernels that read the same rows, one after the other."""

    row_sums: Launch
    columns: Launch
    tiles: int
    """Each part of the rows has a block of ``columns`` for every one of them."""


@functools.cache
def _wide(norm: Norm, aligned: bool, sums: bool) -> Wide:
    vector = _vector(norm.width, (norm.input, norm.output), aligned=aligned)
    over, tile = _over(norm.width, vector, _MOST_LANES), Layout(vector, 32, 1, 8)
    numbers = {**tile.numbers(), "SUMS": sums, "BLOCKS": _COLUMN_BLOCKS}
    row_sums = kernel("norm_row_sums", "norm_row_sums", (), norm.device, norm.defines(**over.numbers()))
    columns = kernel("norm_columns", "norm_columns", (), norm.device, norm.defines(**numbers))
    tiles = -(-norm.width // (32 * vector))
    parts = max(1, _COLUMN_BLOCKS * _processors(norm.device) // tiles)
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
