"""Draws a curve as text for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LABEL, _WIDTH, _HEIGHT = 10, 60, 12


def drawn(values: Sequence[float], *, marked: int | None) -> list[str]:
    """Returns the text lines of a plot of ``values``: ``*`` is a column's mean, ``O`` the column of index ``marked``."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ["(no finite value)"]
    low, high = min(finite), max(finite)
    width = min(_WIDTH, len(values))
    rows = [[" "] * width for _ in range(_HEIGHT)]
    for column in range(width):
        first, last = column * len(values) // width, (column + 1) * len(values) // width
        within = [value for value in values[first:last] if math.isfinite(value)]
        if within:
            share = (sum(within) / len(within) - low) / ((high - low) or 1.0)
            is_marked = marked is not None and first <= marked < last
            rows[round((1 - share) * (_HEIGHT - 1))][column] = "O" if is_marked else "*"
    labels = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    return [f"{labels.get(index, ''):>{_LABEL}} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]
