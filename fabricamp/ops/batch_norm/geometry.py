"""How the blocks of SyncBatchNorm's kernels share a layer: which channels and which of their positions each serves.

It follows from the layer's sizes and from how many blocks the card runs at once.  The estimates below decide about speed alone, and
every division gives right numbers.
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
"""Bytes of neighbouring channels that are read at once where all is large: a line of the cache."""
_SECTOR: Final = 32
"""The least that is read from memory."""
_AT_ONCE: Final = 4
"""Vectors that a thread of ``statistics`` has on their way."""
_SPLITS_AT_ONCE: Final = 8
_GROUPS: Final = 32

# What reading, adding and meeting take in proportion to each other: microseconds of an H200, of which any multiple decides alike.
_LATENCY: Final = 0.5
_VECTOR_READ: Final = 0.07
"""One vector of each of 512 threads."""
_VECTOR_SUMMED: Final = 0.1
_NARROW: Final = 0.02
"""What each halving of a line costs for such vectors more."""
_MEETING: Final = 1.8
"""The blocks of a tile meet: a fence, a ticket, and sums that are read again."""


class Tiling(NamedTuple):
    """How a launch is divided: into ``tiles`` of channels, of ``splits`` of ``per_split`` positions each (the last has the rest).

    A block's threads are 2**column_bits side by side along the channels and 2**lane_bits along the positions.
    """

    tiles: int
    splits: int
    per_split: int
    column_bits: int
    lane_bits: int

    @property
    def blocks(self) -> int:
        """How many are launched."""
        return self.tiles * self.splits


class Geometry:
    """How values of one shape and layout lie: in planes of a channel, or with the channels side by side.

    Kernels that add up take ``sums``: for few positions one block a tile, since blocks that meet take longer than the reading.
    Those that write every value take ``spread``: whole lines, and as many of the ``blocks`` that run at once as have work.
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
        # Of many small planes, as many at once as fit.
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
        """At most so many splits, and those that run at once."""
        width = 1 if self.planes else self.vector << column_bits
        tiles = -(-self.channels // width)
        lanes = self.threads >> column_bits
        splits = max(1, min(splits, -(-self.positions // lanes), blocks // max(1, tiles)))
        per_split = max(1, -(-self.positions // splits))
        splits = max(1, -(-self.positions // per_split))
        return Tiling(tiles, splits, per_split, column_bits, lanes.bit_length() - 1)

    def _microseconds(self, tiling: Tiling, blocks: int) -> float:
        """About what ``statistics`` takes."""
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
