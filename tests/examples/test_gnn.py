"""The graph example: it finds the communities of the test nodes with the graph's edges, and half of them without edges."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "gnn" / "train.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns the numbers in its last line that match ``pattern``."""

    def run(pattern, *arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--folder", "runs", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found = re.fullmatch(pattern, capsys.readouterr().out.splitlines()[-1])
        assert found
        return [float(number) for number in found.groups()]

    return run


PATTERN = r"accuracy on the test nodes: ([\d.]+)% with the graph, ([\d.]+)% without its edges"


def test_the_short_form_learns_from_the_edges(run):
    with_edges, without = run(PATTERN, "--quick")
    assert with_edges > 85
    assert without < 65
    assert list(Path("runs").rglob("*.ckpt"))


def test_each_node_is_in_one_part():
    graph = runpy.run_path(str(SCRIPT))["make_graph"]()
    assert all(graph["train"].int() + graph["val"] + graph["test"] == 1)
    assert graph["community"][graph["train"]].bincount().tolist() == [10] * 5


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    with_edges, without = run(PATTERN)
    assert with_edges > 94
    assert without < 60


def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run(PATTERN, "--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
