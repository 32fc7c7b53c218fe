"""The tool that compares two trees bit by bit draws each value often enough, and finds no difference between a tree and itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.two_trees_bits import FAULTS, columns, compare, draw

ROOT = Path(__file__).resolve().parent.parent


def test_each_value_is_drawn_and_a_seed_draws_the_same():
    drawn = draw(seed=0, count=120)
    assert drawn == draw(seed=0, count=120) != draw(seed=1, count=120)
    table, neutral, _ = columns()
    assert all(neutral(asked) == asked for asked in drawn)
    for name, values in table.items():
        assert {asked[name] for asked in drawn} == set(values), name


@pytest.mark.slow
def test_a_tree_equals_itself(capsys):
    assert compare(ROOT, ROOT, seed=0, count=4, workers=2, shown=5)
    assert "4 configurations: 0 differ" in capsys.readouterr().out


def test_each_fault_has_its_place():
    for fault, (file, text, instead) in FAULTS.items():
        assert (ROOT / "fabricamp" / file).read_text().count(text) == 1, fault
        assert text != instead
