"""The rows of tests/pairs.py contain every pair, and their number is small."""

from __future__ import annotations

import itertools

from tests.pairs import pairs


def test_each_two_values_of_two_columns_meet():
    columns = ["abc", range(4), (None, 0.5)]
    rows = pairs(*columns)
    for one, other in itertools.combinations(range(3), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(columns[one], columns[other]))
    assert len(rows) == len(set(rows)) == 12
