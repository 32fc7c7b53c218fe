"""Draws plots in the terminal: lines of braille dots, or of one character per run if colours cannot distinguish the runs.

:func:`show` prints panels.  A :class:`Canvas` turns the lines of one panel into characters.
"""

from __future__ import annotations

import math
import sys
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from fabricamp.runs.panels import is_better_low

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp.runs.panels import Line, Panel

_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
_HEIGHTS = (9, 5)
"""Height in rows of the first panel, and of the other panels."""
_LARGEST_POWER = 1023
_LABEL = 9
"""Columns of a value's label."""


class _Glyphs(NamedTuple):
    """Characters that a terminal can show: ``marks``: one per run; ``raw``: unsmoothed values; ``dots``: whether braille dots."""

    marks: str
    raw: str
    axis: str
    corner: str
    dash: str
    dots: bool


_UNICODE = _Glyphs("•+xo*#", "·", "│", "└", "─", dots=True)
_ASCII = _Glyphs("*+xo%#", ".", "|", "+", "-", dots=False)


def show(panels: Sequence[Panel], console: Console | None = None) -> None:
    """Prints the panels in the terminal's width."""
    console = console or Console(highlight=False)
    # As one text: a notebook makes an output of each print.
    picture = Text("\n").join(_Picture(panels, console).lines())
    console.print(picture, no_wrap=True, overflow="ellipsis", crop=True)


class _Picture:
    """All panels, with what they share: runs, colours or marks, width, and the range of steps."""

    def __init__(self, panels: Sequence[Panel], console: Console) -> None:
        self._panels = panels
        self._glyphs = _UNICODE if console.encoding.startswith("utf") else _ASCII
        self._runs = list(dict.fromkeys(line.run for panel in panels for line in panel.lines))
        coloured = console.color_system is not None and not console.no_color
        self._in_dots = self._glyphs.dots and (coloured or len(self._runs) == 1)
        self._width = max(console.width - _LABEL - 3, 20)
        steps = [step for panel in panels for line in panel.lines for step in line.curve.steps]
        self._steps = min(steps, default=0), max(steps, default=1)

    def lines(self) -> Iterator[Text]:
        if len(self._runs) > 1:
            for run in self._runs:
                yield Text.assemble((f"{self._mark(run)} ", self._colour(run)), run)
        for number, panel in enumerate(self._panels):
            yield from self._panel(panel, _HEIGHTS[min(number, 1)])

    def _panel(self, panel: Panel, height: int) -> Iterator[Text]:
        layers = [
            (line, drawn, is_raw)
            for is_raw in (True, False)  # a later layer covers an earlier one: smoothed lines lie above raw values
            for line in panel.lines
            for drawn in _drawn(line, panel, is_raw=is_raw)
        ]
        points = chain.from_iterable(drawn for _, drawn, _ in layers)
        frame = frame_of(self._steps, [y for _, y in points if math.isfinite(y)])
        canvas = Canvas(self._width, height, frame)
        for layer, (_, drawn, _) in enumerate(layers):
            canvas.draw(drawn, layer)
        yield from self._title(panel)
        styles = [(line.run, is_raw) for line, _, is_raw in layers]
        for row, cells in enumerate(canvas.rows()):
            share = 1 - row / (height - 1)
            value = frame.low * (1 - share) + frame.high * share
            label = ""
            if row in (0, height // 2, height - 1):
                label = _number(2 ** min(value, _LARGEST_POWER) if panel.logarithmic else value)
            yield self._row(label, cells, styles)
        first = f"{int(frame.left)}"
        last = f"step {int(frame.right)}"
        between = self._glyphs.dash * max(self._width - len(first) - len(last) - 2, 1)
        yield Text(f"{'':>{_LABEL}} {self._glyphs.corner}{first} {between} {last}", "dim")
        yield from self._skips(panel, canvas)

    def _title(self, panel: Panel) -> Iterator[Text]:
        """Yields the panel's title, and each run's last value and its lowest or highest value."""
        names = list(dict.fromkeys(line.metric for line in panel.lines))
        head = Text.assemble((panel.title, "bold"), "" if names == [panel.title] else f"  {', '.join(names)}")
        if len(self._runs) <= 1:
            whole = Text.assemble(head, *((f"  {_summary(line)}", "dim") for line in panel.lines))
            if whole.cell_len <= self._width + _LABEL + 3:
                yield whole
                return
            yield head
            yield from (Text(f"{'':>{_LABEL}} {_summary(line)}", "dim") for line in panel.lines)
            return
        yield head
        for line in panel.lines:
            yield Text.assemble(
                f"{'':>{_LABEL}} ", (f"{self._mark(line.run)} ", self._colour(line.run)), (_summary(line), "dim")
            )

    def _row(self, label: str, cells: Sequence[Cell | None], styles: Sequence[tuple[str, bool]]) -> Text:
        text = Text.assemble((f"{label:>{_LABEL}} {self._glyphs.axis}", "dim"))
        for cell in cells:
            if cell is None:
                text.append(" ")
                continue
            run, is_raw = styles[cell.layer]
            colour = self._colour(run)
            text.append(self._glyph(run, cell.dots, is_raw=is_raw), f"dim {colour}" if is_raw else colour)
        text.rstrip()
        return text

    def _glyph(self, run: str, dots: int, *, is_raw: bool) -> str:
        if is_raw:
            return self._glyphs.raw
        return chr(0x2800 + dots) if self._in_dots else self._mark(run)

    def _skips(self, panel: Panel, canvas: Canvas) -> Iterator[Text]:
        several = len(self._runs) > 1
        for line in panel.lines:
            columns = {canvas.column(step) for step in line.skipped}
            mark = self._mark(line.run) if several else "x"
            marks = "".join(mark if column in columns else " " for column in range(max(columns, default=-1) + 1))
            if marks:
                yield Text(f"{'skipped':>{_LABEL}}  {marks}", self._colour(line.run) if several else "red")

    def _mark(self, run: str) -> str:
        return self._glyphs.marks[self._runs.index(run) % len(self._glyphs.marks)]

    def _colour(self, run: str) -> str:
        return _COLOURS[self._runs.index(run) % len(_COLOURS)]


def _drawn(line: Line, panel: Panel, *, is_raw: bool) -> list[list[tuple[float, float]]]:
    """Returns the points of a line, in a list; empty for ``is_raw`` without a smoothed line.

    With ``is_raw`` these are the raw values beneath a smoothed line; otherwise the smoothed line, or the values if there is none.
    """
    if is_raw and not line.smoothed:
        return []
    values = line.curve.values if is_raw or not line.smoothed else line.smoothed
    if panel.logarithmic:
        values = [math.log2(value) if math.isfinite(value) else value for value in values]
    return [[(float(step), value) for step, value in zip(line.curve.steps, values, strict=True)]]


def _summary(line: Line) -> str:
    finite = [
        (value, step) for value, step in zip(line.curve.values, line.curve.steps, strict=True) if math.isfinite(value)
    ]
    if not finite:
        return "no finite value"
    low = min(finite, key=itemgetter(0))
    high = max(finite, key=itemgetter(0))
    parts = [f"last {_number(line.curve.values[-1])}"]
    if high > low:
        word = "lowest" if is_better_low(line.metric) else "highest"
        value, step = low if is_better_low(line.metric) else high
        parts.append(f"{word} {_number(value)} at step {step}")
    missing = len(line.curve.values) - len(finite)
    if missing:
        parts.append(f"{missing} not finite")
    return ", ".join(parts)


def _number(value: float) -> str:
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


# -- the canvas --------------------------------------------------------------------------------------------------------------------


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
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    margin = 0.0 if high > low else abs(high) * 0.1 or 1.0
    largest = sys.float_info.max
    return Frame(steps[0], max(steps[1], steps[0] + 1), max(low - margin, -largest), min(high + margin, largest))


def share_of(value: float, first: float, last: float) -> float:
    """Returns where a value lies between two others, 0 to 1; the largest floats do not overflow."""
    if math.isfinite(last - first):
        return (value - first) / (last - first)
    return (value / 2 - first / 2) / (last / 2 - first / 2)


class Canvas:
    """A grid of ``width`` by ``height`` characters within a frame; in each character the last drawn layer is visible."""

    def __init__(self, width: int, height: int, frame: Frame) -> None:
        self._width = width
        self._height = height
        self._frame = frame
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
        return round(share_of(x, self._frame.left, self._frame.right) * (2 * self._width - 1))

    def _up(self, y: float) -> int:
        return round(share_of(y, self._frame.high, self._frame.low) * (4 * self._height - 1))

    def _join(self, before: tuple[int, int], after: tuple[int, int], layer: int) -> None:
        steps = max(abs(after[0] - before[0]), abs(after[1] - before[1]))
        for step in range(1, steps):
            share = step / steps
            x = round(before[0] + (after[0] - before[0]) * share)
            y = round(before[1] + (after[1] - before[1]) * share)
            self._set(x, y, layer)

    def _set(self, x: int, y: int, layer: int) -> None:
        position = (x // 2, y // 4)
        cell = self._cells.get(position)
        dots = (
            cell.dots if cell is not None and cell.layer == layer else 0
        )  # a later layer hides the dots of earlier ones
        self._cells[position] = Cell(layer, dots | _DOTS[y % 4][x % 2])
