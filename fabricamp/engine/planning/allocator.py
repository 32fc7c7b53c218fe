"""A model of torch's caching allocator: which blocks and segments a sequence of requests takes on one stream."""

from __future__ import annotations

import bisect
from typing import Final

_UNIT: Final = 512
"""Requests are rounded up to it."""
_MIB: Final = 2**20
_SMALL: Final = _MIB
"""Up to it, requests are served from small segments."""
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE: Final = 10 * _MIB
"""From it on, a segment is as large as the request, in steps of 2 MiB."""
_LARGE_SEGMENT: Final = 20 * _MIB


class _Block:
    """A part of a segment, with its neighbours there."""

    __slots__ = ("after", "before", "free", "place", "size", "small")

    def __init__(self, size: int, place: int, *, small: bool) -> None:
        self.size = size
        self.place = place
        self.small = small
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """Serves requests as torch's allocator does with its default settings: best fit among free blocks, which are split and joined.

    ``allocated`` and ``reserved`` are bytes now, ``peak_allocated`` and ``peak_reserved`` the most so far, by torch's counting:
    whole blocks, and whole segments.

    >>> allocator = CachingAllocator()
    >>> block = allocator.take(100)
    >>> allocator.allocated, allocator.reserved
    (512, 2097152)
    >>> allocator.give(block)
    >>> allocator.allocated, allocator.reserved
    (0, 2097152)
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next_place = 0

    def take(self, size: int) -> _Block | None:
        """Returns a block for ``size`` bytes; None for none."""
        if size <= 0:
            return None
        rounded = -(-size // _UNIT) * _UNIT
        small = rounded <= _SMALL
        block = self._best(rounded, small=small) or self._segment(rounded, small=small)
        left = block.size - rounded
        if (small and left >= _UNIT) or (not small and left > _SMALL):
            self._split(block, rounded)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: _Block | None) -> None:
        """Takes a block back, and joins it with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block = self._joined(block, other)
        self._add(block)

    def _best(self, size: int, *, small: bool) -> _Block | None:
        free = self._free[small]
        index = bisect.bisect_left(free, size, key=lambda one: one[0])
        if index == len(free):
            return None
        return free.pop(index)[2]

    def _segment(self, size: int, *, small: bool) -> _Block:
        if small:
            whole = _SMALL_SEGMENT
        elif size < _LARGE:
            whole = _LARGE_SEGMENT
        else:
            whole = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(whole, self._next_place, small=small)
        self._next_place += 2 * whole  # segments are never neighbours
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.place + size, small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._add(rest)

    def _joined(self, block: _Block, other: _Block) -> _Block:
        first, second = (other, block) if other.place < block.place else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _add(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.place, block), key=lambda one: one[:2])

    def _remove(self, block: _Block) -> None:
        free = self._free[block.small]
        index = bisect.bisect_left(free, (block.size, block.place), key=lambda one: one[:2])
        del free[index]
