"""Plans the layout of the LayerNorm and RMSNorm kernels for a row width: threads, blocks and clusters per row.

A plan depends on the row and on the card's properties: multiprocessors, their threads and shared memory, clusters.  The constants
below come from the kernels, from the compiler, or from the widths at which one layout became faster than another on an H200.  They
only affect speed; every plan gives correct results.  ops/dispatch.py decides by measurement whether a kernel runs at all.

In order: the :class:`Norm` that is planned, how a row is divided (:class:`Layout`), the forward's layout, the backward's (by a
ring, with column sums, without), and what the device offers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fabricamp.ops.bridge import Defines, c_type

if TYPE_CHECKING:
    from fabricamp.ops.bridge import Kernel

_MOST_LANES: Final = 1024
_FORWARD_LANES: Final = 256
_WORDS: Final = {8: 1280, 16: 1024, 32: 512}
"""Pairs of the registers that a thread of norm_forward.cu uses for a row, and the threads that a multiprocessor then holds.  The
first entry is taken for which the row fits into ``_FORWARD_LANES`` threads.  With each of them 40 KB or more are in flight."""

_MOST_REGISTERS: Final = 255
_SHARED_ELEMENTS: Final = 32
_SHARED_VECTOR: Final = 4
_SHARED_LANES: Final = (128, 512)
"""If the column sums are in shared memory: elements of a row per thread, the least number of neighbours per load, and the fewest
and most threads per row."""

_SHARED_FROM: Final = {2: 8192, 4: 12288}
_SLICE: Final = 2048
"""Row width, by bytes per element, from which several blocks of norm_backward.cu share a row; and the most elements of a slice,
if 8 blocks suffice for that."""

_OF_A_ROW: Final = ((8, 256), (16, 256), (8, 512), (16, 512))
_OF_A_SLICE: Final = {2: ((16, 512),), 4: ((8, 512), (16, 512))}
"""If the column sums are in registers: candidates of (elements per thread, most threads).  For a full row the candidate with most
bytes in flight is taken; for a slice (by bytes per element) the first candidate that fits, as was measured."""

_RING_FROM: Final = {2: 4096, 4: 8192}
_RING_SLICE: Final = 2048
"""Row width, by bytes per element, from which norm_backward_ring.cu is used; and the most elements of a block's slice, if 8 blocks
suffice for that.  Both were measured."""

_RING_ELEMENTS: Final = 16
_RING_LANES: Final = 512
"""Elements of a row per thread of norm_backward_ring.cu, and the number of such threads that a multiprocessor has registers for."""

_RING_BYTES: Final = 16
"""Slices of norm_backward_ring.cu begin and end at multiples of this number of bytes in memory."""

_OWN_SHARED: Final = 1024 + 640
"""Additional bytes of shared memory per block: those of the system, and those of the sums over a row."""


class Norm(NamedTuple):
    """A normalisation: the row width, the dtypes and the options that its kernels are compiled for."""

    width: int
    center: bool
    """True: LayerNorm, which subtracts the mean.  False: RMSNorm."""
    input: torch.dtype
    output: torch.dtype
    parameter: torch.dtype | None
    """The dtype of weight and bias; None if there is neither."""
    weight: bool
    bias: bool
    efficient: bool
    """Backward gets the output instead of the input."""
    device: torch.device

    def defines(self, **more: int) -> Defines:
        """Returns the macros that the kernels are compiled with."""
        types = {"INPUT": self.input, "OUTPUT": self.output, "PARAMETER": self.parameter or torch.float32}
        types["SAVED"] = self.output if self.efficient else self.input
        flags = {"CENTER": self.center, "WEIGHT": self.weight, "BIAS": self.bias, "EFFICIENT": self.efficient}
        numbers = {"WIDTH": self.width, **flags, **more}
        return (
            *((name, str(int(number))) for name, number in numbers.items()),
            *((name, c_type(dtype)) for name, dtype in types.items()),
        )


def vector_of(width: int, dtypes: tuple[torch.dtype | None, ...], *, aligned: bool) -> int:
    """Returns how many neighbours a thread loads at once: 16 bytes of the widest dtype, or fewer, so that they divide the row.

    Without ``aligned`` operands it is 1.
    """
    if not aligned:
        return 1
    return math.gcd(width, 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None))


class Layout(NamedTuple):
    """How rows are distributed: ``lanes`` threads per row, each with ``items`` loads of ``vector`` neighbours.

    A block works on ``groups`` rows.  With ``cluster`` > 1 this many blocks share a row in equal slices, and ``groups`` is 1.
    """

    vector: int
    lanes: int
    items: int
    groups: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups

    @property
    def elements(self) -> int:
        """Elements that the threads of a row can hold in one block."""
        return self.vector * self.lanes * self.items

    def numbers(self) -> dict[str, int]:
        """Returns the layout as macros for the kernels."""
        return {name.upper(): number for name, number in self._asdict().items()}


def _layout(width: int, vector: int, items: int, threads: int, cluster: int = 1) -> Layout:
    """Returns the layout with at most ``items`` loads per thread, and blocks of about ``threads``, or of one slice of a row."""
    packs = width // cluster // vector
    lanes = _lanes(packs, items)
    if cluster > 1:
        lanes = max(32, lanes)
        groups = 1
    else:
        groups = max(1, threads // lanes)
    return Layout(vector, lanes, -(-packs // lanes), groups, cluster)


def _lanes(packs: int, items: int) -> int:
    """Returns how many threads share a row: a power of two up to a warp, then full warps."""
    lanes = -(-packs // items)
    if lanes > 32:
        return -(-lanes // 32) * 32
    return 1 << max(1, (lanes - 1).bit_length())


def _words(items: int, vector: int, dtype: torch.dtype) -> int:
    """Returns the number of registers for a thread's part of a row."""
    return items * max(1, vector * dtype.itemsize // 4)


def forward_layout(norm: Norm, vector: int) -> tuple[Layout, int] | None:
    """Returns a layout with the row in registers, with the fewest blocks per row, and the blocks per multiprocessor; or None."""
    for cluster in _clusters(norm, vector):
        for words, threads in _WORDS.items():
            layout = _layout(norm.width, vector, words // _words(1, vector, norm.input), 128, cluster)
            if layout.lanes <= _FORWARD_LANES:
                return layout, min(threads, _threads(norm.device)) // layout.threads
    return None


def over(width: int, vector: int) -> Layout:
    """Returns the layout of a row that one block reads repeatedly, with all its threads."""
    return Layout(vector, _MOST_LANES, -(-width // (vector * _MOST_LANES)), 1)


def _clusters(norm: Norm, vector: int) -> list[int]:
    """Returns how many blocks may share a row in equal slices, the fewest first."""
    return [size for size in cluster_sizes(norm.device) if norm.width % (size * vector) == 0]


def backward(norm: Norm, *, aligned: bool, sums: bool) -> Residents | Ring | None:
    """Returns the layout of a kernel that computes the gradients in one pass; None if a row or its column sums do not fit."""
    vector = vector_of(norm.width, (norm.input, norm.output), aligned=aligned)
    if not sums:
        return without_sums(norm, vector)
    return (ring(norm) if aligned else None) or with_sums(norm, vector)


class Ring(NamedTuple):
    """A layout of norm_backward_ring.cu: rows pass through a ring of ``stages`` buffers in shared memory."""

    layout: Layout
    stages: int
    blocks: int
    """Blocks per multiprocessor."""
    shared: int
    """Dynamic shared memory of a block, in bytes."""

    def numbers(self) -> dict[str, int]:
        """Returns the layout as macros for the kernel."""
        return {**self.layout.numbers(), "STAGES": self.stages, "BLOCKS": self.blocks}


def ring(norm: Norm) -> Ring | None:
    """Returns the layout of norm_backward_ring.cu, for operands at multiples of 16 bytes.

    Returns None if the device has no clusters, if the rows are narrow, or if they cannot be divided into slices or do not fit.
    """
    saved = norm.output if norm.efficient else norm.input
    narrow, wide = sorted((saved.itemsize, norm.output.itemsize))
    vector = vector_of(norm.width, (norm.input, norm.output), aligned=True)
    sizes = cluster_sizes(norm.device)
    clusters = [size for size in sizes if norm.width % (size * (_RING_BYTES // narrow)) == 0]
    if not clusters or max(sizes) == 1 or norm.width < _RING_FROM[norm.input.itemsize]:
        return None
    cluster = next((size for size in clusters if norm.width // size <= _RING_SLICE), clusters[-1])
    layout = _layout(norm.width, vector, _RING_ELEMENTS // vector, 1, cluster)
    stages = 4 if wide == 2 else 3
    shared = stages * norm.width // cluster * (narrow + wide)
    blocks = min(_RING_LANES // layout.threads, _shared_memory(norm.device) // (shared + _OWN_SHARED))
    return Ring(layout, stages, blocks, shared) if blocks else None


_IN_REGISTERS, _IN_SHARED_MEMORY = 1, 2
"""Where a block of norm_backward.cu keeps its column sums; 0: it has none."""


class Residents(NamedTuple):
    """A layout of norm_backward.cu, with the blocks that a multiprocessor holds and the bytes that these have in flight."""

    layout: Layout
    sums: int
    ahead: bool
    blocks: int
    bytes: int
    shared: int
    """Dynamic shared memory of a block, in bytes."""

    def numbers(self) -> dict[str, int]:
        """Returns the layout as macros for the kernel."""
        return {**self.layout.numbers(), "SUMS": self.sums, "AHEAD": self.ahead, "BLOCKS": max(1, self.blocks)}


def with_sums(norm: Norm, vector: int) -> Residents | None:
    """Returns a layout of norm_backward.cu with column sums in each block beside its rows; None if that does not fit."""
    cluster = _cluster(norm, vector)
    candidates = _OF_A_ROW if cluster == 1 else _OF_A_SLICE[norm.input.itemsize]
    for ahead in (True, False):
        plans = []
        for elements, threads in candidates:
            layout = _layout(norm.width, vector, max(1, elements // vector), threads, cluster)
            if layout.lanes <= threads:
                plans.append(_residents(norm, layout, _IN_REGISTERS, ahead=ahead))
        wide = _layout(norm.width, vector, _SHARED_ELEMENTS // vector, 1, cluster)
        fewest, most = _SHARED_LANES
        if vector >= _SHARED_VECTOR and fewest <= wide.lanes <= most:
            plans.append(_residents(norm, wide, _IN_SHARED_MEMORY, ahead=ahead))
        fitting = [plan for plan in plans if plan.blocks > 0]
        if fitting:
            return fitting[0] if cluster > 1 else max(fitting, key=lambda plan: plan.bytes)
    return None


def _cluster(norm: Norm, vector: int) -> int:
    """Returns how many blocks share a row if they sum columns."""
    clusters = _clusters(norm, vector)
    if norm.width < _SHARED_FROM[norm.input.itemsize]:
        return clusters[0]
    return next((size for size in clusters if norm.width // size <= _SLICE), clusters[-1])


def without_sums(norm: Norm, vector: int) -> Residents | None:
    """Returns the layout of norm_backward.cu for the gradient of the input only; None if a row does not fit."""
    for most in (_MOST_LANES // 2, _MOST_LANES):  # with the most lanes, few layouts have enough registers
        for cluster, elements in itertools.product(_clusters(norm, vector), (8, 16)):
            layout = _layout(norm.width, vector, max(1, elements // vector), 128, cluster)
            plan = _residents(norm, layout, 0, ahead=False)
            if layout.lanes <= most and plan.blocks > 0:
                return plan._replace(blocks=1)
    return None


def _registers(norm: Norm, layout: Layout, sums: int, ahead: bool) -> int:
    """Returns the registers that a thread of norm_backward.cu needs; the constants are the compilers' observed overhead."""
    part = layout.items, layout.vector
    elements = layout.items * layout.vector
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


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _threads(device: torch.device) -> int:
    """Returns the most threads that a multiprocessor holds."""
    return torch.cuda.get_device_properties(device).max_threads_per_multi_processor if device.type == "cuda" else 2048


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory of a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 2**17


_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, 72 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def cluster_sizes(device: torch.device) -> tuple[int, ...]:
    """Returns the possible numbers of blocks in a cluster: up to 8, which every card from compute capability 9.0 on supports."""
    has_clusters = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (1, 2, 4, 8) if has_clusters else (1,)


def resident_clusters(kernel: Kernel, device: torch.device, size: int, threads: int, shared: int) -> int | None:
    """Returns how many clusters of ``size`` blocks ``device`` holds at once, or None if its driver does not say.

    That may be fewer than the resident blocks divided by ``size``: the blocks of a cluster run on neighbouring multiprocessors, and
    not every group of multiprocessors holds a multiple of ``size``.
    """
    if device.type != "cuda":
        return None
    import cupy

    assert ctypes.sizeof(_Attribute) == 72
    attributes = (_Attribute * 1)(_Attribute(_CLUSTER_DIMENSION, 0, (size, 1, 1)))
    config = _Config((size, 1, 1), (threads, 1, 1), shared, None, attributes, 1)
    count = ctypes.c_int()
    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.memGetInfo()  # binds the context to this thread, maybe one of autograd's
        try:
            max_active_clusters = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
        except (OSError, AttributeError):
            return None
        status = max_active_clusters(ctypes.byref(count), ctypes.c_void_p(kernel.address), ctypes.byref(config))
    return count.value if status == 0 and count.value > 0 else None
