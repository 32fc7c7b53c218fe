"""How the kernels of LayerNorm and RMSNorm are laid out over rows of a width.

A plan follows from the row, and from what the card says of itself: multiprocessors, their threads and shared memory, clusters.  The
constants below are of the kernels, of the compiler, or where one way began to be faster than another on an H200; they decide about
speed alone, and every plan gives right numbers.  ops/dispatch.py decides, by measurement, whether any of them runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Final, NamedTuple

import torch

from fabricamp.ops.bridge import Defines, c_type
from fabricamp.ops.norm import clusters

_MOST_LANES: Final = 1024
_FORWARD_LANES: Final = 256
_WORDS: Final = {8: 1280, 16: 1024, 32: 512}
"""Registers that a thread of norm_forward.cu gives to a row, the next where the row would not fit into ``_FORWARD_LANES``
threads; and the threads that a multiprocessor is to hold then: 40 KB or more are on their way so."""

_MOST_REGISTERS: Final = 255
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

_RING_FROM: Final = {2: 4096, 4: 8192}
_RING_SLICE: Final = 2048
"""Elements of a row, by the bytes of one, from which it comes through norm_backward_ring.cu; and of each block's slice at most,
where 8 are enough: as was measured."""

_RING_ELEMENTS: Final = 16
_RING_LANES: Final = 512
"""Elements of a row that a thread of norm_backward_ring.cu has, and how many such threads a multiprocessor has registers for."""

_RING_BYTES: Final = 16
"""Its slices begin and end at multiples of these, in memory."""

_OWN_SHARED: Final = 1024 + 640
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


def vector_of(width: int, dtypes: tuple[torch.dtype | None, ...], *, aligned: bool) -> int:
    """Returns how many neighbours a thread loads at once: 16 bytes of the widest dtype, fewer where they do not divide the row."""
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


def over(width: int, vector: int) -> Layout:
    """Returns the layout of a row that is read over and over by a whole block."""
    return Layout(vector, _MOST_LANES, -(-width // (vector * _MOST_LANES)), 1)


def forward_layout(norm: Norm, vector: int) -> tuple[Layout, int] | None:
    """Returns a layout that holds a row in registers, with the fewest blocks to one, and the blocks that a multiprocessor holds."""
    for cluster in _clusters(norm, vector):
        for words, threads in _WORDS.items():
            layout = _layout(norm.width, vector, words // _words(1, vector, norm.input), 128, cluster)
            if layout.lanes <= _FORWARD_LANES:
                return layout, min(threads, _threads(norm.device)) // layout.threads
    return None


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
    warps = min(512 // registers * 4, _threads(norm.device) // 32) if registers <= _MOST_REGISTERS else 0
    blocks = warps // (layout.threads // 32)
    shared = 0
    if sums == _IN_SHARED_MEMORY:
        shared = layout.elements * (norm.weight + norm.bias) * 4
        blocks = min(blocks, _shared_memory(norm.device) // (shared + _OWN_SHARED))
    saved = norm.output if norm.efficient else norm.input
    in_flight = blocks * layout.groups * norm.width // layout.cluster * (saved.itemsize + norm.output.itemsize)
    return Residents(layout, sums, ahead, blocks, in_flight, shared)


def with_sums(norm: Norm, vector: int) -> Residents | None:
    """Returns how blocks of norm_backward.cu keep the sums of columns beside their rows; None where they cannot."""
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
def processors(device: torch.device) -> int:
    """Returns how many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _threads(device: torch.device) -> int:
    """Those that a multiprocessor holds."""
    return torch.cuda.get_device_properties(device).max_threads_per_multi_processor if device.type == "cuda" else 2048


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 2**17


def without_sums(norm: Norm, vector: int) -> Residents | None:
    """Returns the layout of norm_backward.cu for the gradient of the input alone; None where a row does not fit."""
    for most in (_MOST_LANES // 2, _MOST_LANES):  # of the most lanes few have registers enough
        for cluster, elements in itertools.product(_clusters(norm, vector), (8, 16)):
            layout = _layout(norm.width, vector, max(1, elements // vector), 128, cluster)
            found = _residents(norm, layout, 0, ahead=False)
            if layout.lanes <= most and found.blocks > 0:
                return found._replace(blocks=1)
    return None


class Ring(NamedTuple):
    """A layout of norm_backward_ring.cu: rows come through ``stages`` places in shared memory."""

    layout: Layout
    stages: int
    blocks: int
    """Of a multiprocessor."""
    shared: int
    """Dynamic shared memory of a block, in bytes."""

    def numbers(self) -> dict[str, int]:
        """Returns what the kernel is told of it."""
        return {**self.layout.numbers(), "STAGES": self.stages, "BLOCKS": self.blocks}


def ring(norm: Norm) -> Ring | None:
    """Returns the layout of norm_backward_ring.cu, for operands at multiples of 16 bytes.

    None where the device has no clusters, where the rows are narrow, and where they cannot be shared out or do not fit.
    """
    saved = norm.output if norm.efficient else norm.input
    narrow, wide = sorted((saved.itemsize, norm.output.itemsize))
    vector = vector_of(norm.width, (norm.input, norm.output), aligned=True)
    able = [one for one in clusters.sizes(norm.device) if norm.width % (one * (_RING_BYTES // narrow)) == 0]
    if not able or max(clusters.sizes(norm.device)) == 1 or norm.width < _RING_FROM[norm.input.itemsize]:
        return None
    cluster = next((one for one in able if norm.width // one <= _RING_SLICE), able[-1])
    layout = _layout(norm.width, vector, _RING_ELEMENTS // vector, 1, cluster)
    stages = 4 if wide == 2 else 3
    shared = stages * norm.width // cluster * (narrow + wide)
    blocks = min(_RING_LANES // layout.threads, _shared_memory(norm.device) // (shared + _OWN_SHARED))
    return Ring(layout, stages, blocks, shared) if blocks else None


def backward(norm: Norm, *, aligned: bool, sums: bool) -> Residents | Ring | None:
    """Returns how a kernel makes the gradients in one reading; None where a row, or the sums that go with it, do not fit."""
    vector = vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    if not sums:
        return without_sums(norm, vector)
    return (ring(norm) if aligned else None) or with_sums(norm, vector)
