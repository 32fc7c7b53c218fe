"""The benchmark of the gradient exchange on two CPU ranks: it measures every variant, and its goals name existing variants."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it: here once, before the ranks are forked, instead of in each rank

from benchmarks import ddp, loop_ranks, render, rounds
from tests.distributed.ranks import run_ranks


def quick(path):
    torch.cuda.is_available = lambda: False
    ddp.main(["--quick", "--rounds", "1", "--turns", "2", "--steps", "2", "--out", str(path)])


def test_every_way_is_measured(tmp_path):
    run_ranks(quick, 2, tmp_path / "found.json", backend=None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["columns"]) == list(ddp.QUICK)
    for column in found["columns"].values():
        assert [row["run"] for row in column["rows"]] == [*ddp.WAYS, ddp.FLAT]
        assert all(row["wall_ms"] > 0 and row["gpu_ms"] is None for row in column["rows"])
        assert set(column["ratios"]) == set(column["wall"]) == set(ddp.GOALS)
    assert found["ranks"] == 2
    page = render.ddp(found)
    assert "None" not in page
    for name, column in found["columns"].items():
        assert f"| {name} | GPU ms |" in page
        assert f"{column['ratios']['delayed']:.3f}" in page
    assert f"| {ddp.FLAT} |" in page
    assert page.count(", met |") + page.count(", missed |") + page.count(", not decided |") == 4


def test_turns_begin_with_another_variant_each(monkeypatch):
    order = []
    monkeypatch.setattr(ddp, "wall_ms", lambda step, steps, device: order.append(step) or float(len(order)))
    found = ddp.wall_ms_of_round({"a": 1, "b": 2, "c": 3}, 4, 8, torch.device("cpu"))
    assert order == [1, 2, 3, 2, 3, 1, 3, 1, 2, 1, 2, 3]
    assert found == {"a": (1 + 6 + 8 + 10) / 4, "b": (2 + 4 + 9 + 11) / 4, "c": (3 + 5 + 7 + 12) / 4}


def graphs():
    loop_ranks.milliseconds = lambda way, case, precision: {loop_ranks.torchs_graph: 2.0}.get(way, 1.0)
    loop_ranks.about = lambda: {"device": "2 x a card"}
    loop_ranks.exchanges(argparse.Namespace(rounds=3, quick=True, out=Path("found.json")))


def test_graphs_beside_torchs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(graphs, 2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["columns"]) == list(loop_ranks.COLUMNS)
    assert found["rounds"] == 3
    page = render.ddp_graphs(found)
    assert "| delayed over torch's | 0.500 (0.500 to 0.500), met |" in page
    assert f"| {loop_ranks.TORCHS_GRAPH} | 2.00 |" in page


def test_a_ratio_is_decided_where_both_quartiles_are_on_one_side():
    other = [10.0, 10.0, 10.0, 10.0]
    assert [
        rounds.ratio(own, other, 1.0)["decided"]
        for own in ([9.0, 9.0, 9.0, 12.0], [9.0, 9.0, 11.0, 11.0], [9.0, 11.0, 11.0, 11.0])
    ] == ["met", "not decided", "missed"]


def test_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc_per_node=2"):
        ddp.main([])
