"""Draws lines in a grid of characters with two by four dots each."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of a dot in a braille character, by row and column."""


class Cell(NamedTuple):
    """One character: its visible layer, and the bits of its braille dots."""

    layer: int
    dots: int


class Frame(NamedTuple):
    """The values at the edges of the grid."""

    left: float
    right: float
    low: float
    high: float


def frame_of(steps: tuple[int, int], values: Sequence[float]) -> Frame:
    """Returns the frame of a step range and finite values; its extent is never zero, even if all steps or values are equal."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    margin = 0.0 if high > low else abs(high) * 0.1 or 1.0
    return Frame(steps[0], max(steps[1], steps[0] + 1), low - margin, high + margin)


class Canvas:
    """A grid of ``width`` by ``height`` characters within a frame; in each character the last drawn layer is visible."""

    def __init__(self, width: int, height: int, frame: Frame) -> None:
        self._width, self._height, self._frame = width, height, frame
        self._cells: dict[tuple[int, int], Cell] = {}

    def column(self, x: float) -> int:
        """Returns the column of a value on the x axis."""
        return self._across(x) // 2

    def draw(self, points: Sequence[tuple[float, float]], layer: int) -> None:
        """Draws lines between points; points that are not finite leave a gap."""
        dots = [(self._across(x), self._up(y)) if math.isfinite(y) else None for x, y in points]
        for dot in dots:
            if dot is not None:
                self._set(*dot, layer)
        for before, after in pairwise(dots):
            if before is not None and after is not None and before != after:
                self._join(before, after, layer)

    def rows(self) -> list[list[Cell | None]]:
        """Returns the characters, top row first."""
        return [[self._cells.get((column, row)) for column in range(self._width)] for row in range(self._height)]

    def _across(self, x: float) -> int:
        frame, last = self._frame, 2 * self._width - 1
        return round((x - frame.left) / (frame.right - frame.left) * last)

    def _up(self, y: float) -> int:
        frame, last = self._frame, 4 * self._height - 1
        return round((frame.high - y) / (frame.high - frame.low) * last)

    def _join(self, before: tuple[int, int], after: tuple[int, int], layer: int) -> None:
        steps = max(abs(after[0] - before[0]), abs(after[1] - before[1]))
        for step in range(1, steps):
            share = step / steps
            x, y = (round(one + (other - one) * share) for one, other in zip(before, after, strict=True))
            self._set(x, y, layer)

    def _set(self, x: int, y: int, layer: int) -> None:
        place = (x // 2, y // 4)
        there = self._cells.get(place)
        dots = there.dots if there is not None and there.layer == layer else 0
        self._cells[place] = Cell(layer, dots | _DOTS[y % 4][x % 2])
