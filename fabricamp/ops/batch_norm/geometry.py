"""Divides a SyncBatchNorm layer among the blocks of its kernels: each block gets channels and a range of their positions.

The division depends on the layer's sizes and on how many blocks the card runs at once.  The estimates below only affect speed;
every division gives correct results.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

WIDEST: Final = 64
"""The most channels of a tile."""
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
        vectors = -(-self.channels // self.vector)
        most = 0 if self.planes else min(5, (_LINE // self._bytes).bit_length() - 1, max(0, vectors - 1).bit_length())
        self.spread = self._tiling(most, blocks, blocks)
        choices = (
            self._tiling(bits, 1 << few, blocks)
            for bits in range(most, -1, -1)
            for few in range(blocks.bit_length() + 1)
        )
        self.sums = min(choices, key=lambda one: self._microseconds(one, blocks))

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
        read, narrow = _VECTOR_READ, 0.0
        if not self.planes:
            size = self._bytes << tiling.column_bits
            read *= max(1.0, _SECTOR / size)
            narrow = _NARROW * math.log2(_LINE / size)
        found = _LATENCY * -(-vectors // _AT_ONCE) + vectors * waves * (_VECTOR_SUMMED + read + narrow)
        if tiling.splits > 1:
            width = 1 if self.planes else self.vector << tiling.column_bits
            each = -(-tiling.splits // min(_GROUPS, self.threads // width))
            found += _MEETING + _LATENCY * -(-each // _SPLITS_AT_ONCE)
        return found
