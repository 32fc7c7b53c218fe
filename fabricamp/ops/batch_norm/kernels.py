"""Launches of ops/batch_norm/sync_batch_norm.cu: arguments are laid out once per layer and shape; later only addresses change.

In order: :class:`KernelPlan`, the launches of one layer and shape; :class:`KernelMemory`, which the plans of a layer share; and
:class:`Geometry`, which divides a layer among the blocks: each block gets channels and a range of their positions.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.ops import bridge
from fabricamp.ops.batch_norm.exchange import Route, gather

THREADS = 512
WAITING_SHARE = 16
"""At most one in this many concurrently running blocks may wait for other ranks.  Kernels of other streams can then still start,
also an NCCL collective on up to 32 multiprocessors, even if several layers wait at once."""
_SOME_ADDRESS: Final = 1
"""The address passed for an empty gradient, which has none; 0 would mean that the gradient is not needed."""
_Layer: Final = bridge.structure("batch_norm.cuh", "Layer")
_Tiling: Final = bridge.structure("batch_norm.cuh", "Tiling")
WIDEST: Final = 64
"""The most channels of a tile."""

_SERVED: Final = (torch.float32, torch.float16, torch.bfloat16)


def serves(x: Tensor, *others: Tensor) -> bool:
    """Returns whether the kernels support this input; ``others`` (parameters, running values) must have one dtype."""
    dtypes = {tensor.dtype for tensor in others}
    if x.dtype not in _SERVED or len(dtypes) > 1 or not dtypes.issubset(_SERVED):
        return False
    return bridge.runs_kernels(x.device) and x.dim() > 1


class KernelPlan:
    """The launches of one layer for inputs of one shape, layout and dtype."""

    def __init__(
        self,
        memory: KernelMemory,
        route: Route,
        x: Tensor,
        parameter: torch.dtype,
        *,
        relu: bool,
        residual: bool,
        channel_last: bool,
    ) -> None:
        self.relu = relu
        self.route = route
        self._memory = memory
        self.failure = None if route.workspace is None else route.workspace.failure
        geometry = Geometry(x, _blocks(x.device), THREADS, channel_last=channel_last)
        self.copies = not geometry.dense
        if self.copies:
            copied = torch.empty(x.shape, dtype=x.dtype, device="meta")
            geometry = Geometry(copied, _blocks(x.device), THREADS, channel_last=channel_last)
        self.alignment = geometry.vector * x.element_size()
        self.saved_size = 3 * geometry.channels + 1
        self.forward_call = self._call(geometry)
        self.backward_call = self._call(geometry)
        defines = (
            ("VALUE", bridge.c_type(x.dtype)),
            ("PARAMETER", bridge.c_type(parameter)),
            ("VECTOR", str(geometry.vector)),
            ("PLANES", str(int(geometry.planes))),
            ("RELU", str(int(relu))),
            ("RESIDUAL", str(int(residual))),
        )
        # Forward launches the first three (merge after a collective only), backward the last two.
        self.statistics = bridge.kernel("sync_batch_norm", "statistics", (), x.device, defines)
        self.merge = bridge.kernel("sync_batch_norm", "merge", (), x.device, defines)
        self.normalise = bridge.kernel("sync_batch_norm", "normalise", (), x.device, defines)
        self.reduce = bridge.kernel("sync_batch_norm", "reduce", (), x.device, defines)
        self.gradient = bridge.kernel("sync_batch_norm", "gradient", (), x.device, defines)
        self.threads = geometry.threads
        self._sum_blocks = geometry.sums.blocks
        self._write_blocks = geometry.spread.blocks
        self._merge_blocks = -(-geometry.channels // self.threads)

    def _call(self, geometry: Geometry) -> ctypes.Structure:
        call = _Layer()
        memory = self._memory
        call.partial = memory.partial.data_ptr()
        call.tickets = memory.tickets.data_ptr()
        call.local = memory.local.data_ptr()
        call.gathered = memory.gathered.data_ptr()
        route = self.route
        call.rank = route.rank
        call.ranks = route.ranks
        call.crosses = int(route.kind == "collective")
        call.group_bits = group_bits(geometry.channels, _blocks(memory.local.device))
        call.channels = geometry.channels
        call.positions = geometry.positions
        call.length = geometry.length
        call.sums = _Tiling(**geometry.sums._asdict())
        call.spread = _Tiling(**geometry.spread._asdict())
        if route.slot is not None and route.workspace is not None:
            call.peers = route.slot.addresses.data_ptr()
            call.own = route.slot.own
            call.exchanges = route.slot.exchanges.data_ptr()
            call.failed = route.workspace.failed.data_ptr()
            call.host_failed = route.workspace.host_failed.data_ptr()
            call.timeout = int(route.workspace.timeout.total_seconds() * 1e9)
        return call

    def dense(self, x: Tensor) -> Tensor:
        """Returns ``x``, copied if the kernels cannot read its layout or its alignment."""
        if self.copies:
            x = x.contiguous()
        return x.clone() if x.data_ptr() % self.alignment else x

    def alike(self, other: Tensor, x: Tensor) -> Tensor:
        """Returns ``other``, copied if its layout differs from that of ``x`` or the kernels cannot read its alignment."""
        if other.stride() != x.stride():
            return torch.empty_like(x).copy_(other)
        return other.clone() if other.data_ptr() % self.alignment else other

    def forward(
        self,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor, Tensor | None] | None,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, and over all ranks each channel's mean, 1 / deviation and variance, then the count (1-dim)."""
        if self.failure is not None and self.failure.value and self.route.workspace is not None:
            self.route.workspace.check()
        call = self.forward_call
        y = torch.empty_like(x)
        saved = torch.empty(self.saved_size, dtype=torch.float32, device=x.device)
        call.x = x.data_ptr()
        call.out = y.data_ptr()
        call.saved = saved.data_ptr()
        call.z = 0 if z is None else z.data_ptr()
        call.weight = 0 if weight is None else weight.data_ptr()
        call.bias = 0 if bias is None else bias.data_ptr()
        call.eps = eps
        call.momentum = momentum
        if running is None:
            call.running_mean = 0
            call.running_var = 0
            call.batches = 0
        else:
            mean, variance, batches = running
            call.running_mean = mean.data_ptr()
            call.running_var = variance.data_ptr()
            call.batches = 0 if batches is None else batches.data_ptr()
        self.statistics(self._sum_blocks, self.threads, call)
        if self.route.kind == "collective":
            gather(self.route, self._memory.local, self._memory.gathered)
            self.merge(self._merge_blocks, self.threads, call)
        self.normalise(self._write_blocks, self.threads, call)
        return y, saved

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        saved: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of x, z, weight and bias; None for those that are not needed."""
        call = self.backward_call
        dy = self.alike(dy, x)
        dx = torch.empty_like(x) if needs[0] else None
        masked = self.relu and needs[1]
        if masked:
            dz: Tensor | None = torch.empty_like(x)
        else:
            dz = dy if needs[1] else None
        dweight = torch.empty_like(weight) if needs[2] and weight is not None else None
        dbias = torch.empty_like(bias) if needs[3] and bias is not None else None
        call.x = x.data_ptr()
        call.dy = dy.data_ptr()
        call.saved = saved.data_ptr()
        call.out = 0 if dx is None else dx.data_ptr() or _SOME_ADDRESS
        call.dz = dz.data_ptr() if masked and dz is not None else 0
        call.z = 0 if z is None else z.data_ptr()
        call.weight = 0 if weight is None else weight.data_ptr()
        call.bias = 0 if bias is None else bias.data_ptr()
        call.weight_gradient = 0 if dweight is None else dweight.data_ptr()
        call.bias_gradient = 0 if dbias is None else dbias.data_ptr()
        if needs[0] or needs[2] or needs[3]:
            self.reduce(self._sum_blocks, self.threads, call)
        if needs[0] and self.route.kind == "collective":
            dist.all_reduce(self._memory.sums, group=self.route.group)
        if needs[0] or masked:
            self.gradient(self._write_blocks, self.threads, call)
        return dx, dz, dweight, dbias


class KernelMemory:
    """Memory of a layer's kernels between launches on one device.

    It is large enough for all shapes and never replaced, because a captured graph may use it.
    """

    def __init__(self, channels: int, route: Route, device: torch.device) -> None:
        row = 2 * channels + 1
        crosses = route.kind == "collective"
        self.partial = torch.empty(WIDEST * (_blocks(device) + 1) + channels, dtype=torch.int64, device=device)
        self.tickets = torch.zeros(channels + -(-channels // WIDEST), dtype=torch.int32, device=device)
        self.local = torch.empty(row, dtype=torch.float32, device=device)
        self.gathered = torch.empty(route.ranks if crosses else 0, row, dtype=torch.float32, device=device)
        self.sums = self.local[: row - 1]


@functools.cache
def _blocks(device: torch.device) -> int:
    """Returns how many blocks run at once: two on each multiprocessor."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


def group_bits(channels: int, blocks: int) -> int:
    """Returns log2 of the number of channels that one block waits for, if ``blocks`` blocks run at once."""
    most = max(1, blocks // WAITING_SHARE)
    bits = WIDEST.bit_length() - 1  # one block waits for at least a tile's channels
    while channels > most << bits:
        bits += 1
    return bits


_FEWEST_THREADS: Final = 128
_LINE: Final = 128
"""Bytes of neighbouring channels to read at once in large layers: one cache line."""
_SECTOR: Final = 32
"""The least number of bytes per read from memory."""
_AT_ONCE: Final = 4
"""Vectors that a thread of ``statistics`` has in flight."""
_SPLITS_AT_ONCE: Final = 8
_GROUPS: Final = 32

# The costs of reading, adding and synchronising: microseconds on an H200.  Only their ratios matter.
_LATENCY: Final = 0.5
_VECTOR_READ: Final = 0.07
"""One vector of each of 512 threads."""
_VECTOR_SUMMED: Final = 0.1
_NARROW: Final = 0.02
"""The additional cost of such vectors for each halving of the line."""
_MEETING: Final = 1.8
"""The blocks of a tile synchronise: a fence, a ticket, and reading their sums again."""


class Geometry:
    """Memory layout and divisions for values of one shape: a channel's values are in planes, or channels are adjacent in memory.

    Kernels that sum use ``sums``: one block per tile if there are few positions, because synchronising blocks takes longer than
    reading.  Kernels that write every value use ``spread``: full lines, and as many of the ``blocks`` that run at once as have
    work.
    """

    def __init__(self, x: Tensor, blocks: int, threads: int, *, channel_last: bool) -> None:
        view = x.movedim(-1, 1) if channel_last else x
        self.channels = view.shape[1]
        self.count = view.numel() // self.channels if self.channels else 0
        plane = self.count // view.shape[0] if view.shape[0] else 0
        self.planes = plane > 1 and view.is_contiguous()
        self.dense = self.planes or view.movedim(1, -1).is_contiguous()
        inner = plane if self.planes else self.channels
        widest = 16 // x.element_size()
        self.vector = next(width for width in (8, 4, 2, 1) if width <= widest and inner % width == 0)
        self.positions = self.count // self.vector if self.planes else self.count
        self.length = plane // self.vector if self.planes else 0
        self.threads = threads
        self._bytes = self.vector * x.element_size()
        # With many small planes, smaller blocks: more of them run at once.
        while self.planes and self.threads > _FEWEST_THREADS and self.channels > blocks * (threads // self.threads):
            self.threads //= 2
        most_bits = 0
        if not self.planes:
            vectors = -(-self.channels // self.vector)
            most_bits = min(5, (_LINE // self._bytes).bit_length() - 1, max(0, vectors - 1).bit_length())
        self.spread = self._tiling(most_bits, blocks, blocks)
        tilings = [
            self._tiling(column_bits, 1 << split_bits, blocks)
            for column_bits in range(most_bits, -1, -1)
            for split_bits in range(blocks.bit_length() + 1)
        ]
        self.sums = min(tilings, key=lambda tiling: self._microseconds(tiling, blocks))

    def _tiling(self, column_bits: int, splits: int, blocks: int) -> Tiling:
        """Returns the tiling with at most ``splits`` splits, and at most as many as run at once."""
        width = 1 if self.planes else self.vector << column_bits
        tiles = -(-self.channels // width)
        lanes = self.threads >> column_bits
        splits = max(1, min(splits, -(-self.positions // lanes), blocks // max(1, tiles)))
        per_split = max(1, -(-self.positions // splits))
        splits = max(1, -(-self.positions // per_split))
        return Tiling(tiles, splits, per_split, column_bits, lanes.bit_length() - 1)

    def _microseconds(self, tiling: Tiling, blocks: int) -> float:
        """Returns an estimate of the time of ``statistics``."""
        vectors = -(-tiling.per_split >> tiling.lane_bits)
        waves = max(1.0, tiling.blocks * self.threads / (256 * blocks))
        read = _VECTOR_READ
        narrow = 0.0
        if not self.planes:
            size = self._bytes << tiling.column_bits
            read *= max(1.0, _SECTOR / size)
            narrow = _NARROW * math.log2(_LINE / size)
        microseconds = _LATENCY * -(-vectors // _AT_ONCE) + vectors * waves * (_VECTOR_SUMMED + read + narrow)
        if tiling.splits > 1:
            width = 1 if self.planes else self.vector << tiling.column_bits
            each = -(-tiling.splits // min(_GROUPS, self.threads // width))
            microseconds += _MEETING + _LATENCY * -(-each // _SPLITS_AT_ONCE)
        return microseconds


class Tiling(NamedTuple):
    """How a launch is divided: into ``tiles`` of channels, each into ``splits`` of ``per_split`` positions (the last has the rest).

    Of a block's threads, 2**column_bits are along the channels and 2**lane_bits along the positions.
    """

    tiles: int
    splits: int
    per_split: int
    column_bits: int
    lane_bits: int

    @property
    def blocks(self) -> int:
        """Number of blocks of the launch."""
        return self.tiles * self.splits
