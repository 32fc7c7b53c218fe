"""A small number of rows that contain every pair of values of two columns, for options that interact at most in pairs.

from tests.pairs import pairs
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

__all__ = ["pairs"]


def pairs(*columns: Collection[Any]) -> list[tuple[Any, ...]]:
    """Returns the rows, chosen greedily: each next row has the most pairs that no earlier row has."""
    rows = list(itertools.product(*(range(len(column)) for column in columns)))
    missing = {pair for row in rows for pair in _within(row)}
    taken = []
    while missing:
        taken.append(max(rows, key=lambda row: sum(pair in missing for pair in _within(row))))
        missing -= {*_within(taken[-1])}
    values = [list(column) for column in columns]
    return [tuple(values[place][index] for place, index in enumerate(row)) for row in sorted(taken)]


def _within(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(row), 2))
