"""The benchmark of the exchange runs on two ranks of a CPU: every way is measured, and the goals are about ways that exist."""

from __future__ import annotations

import json

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it: once here, before ranks are forked, and not in each of them

from benchmarks import ddp, render
from tests.distributed.ranks import run_ranks


def quick(path):
    torch.cuda.is_available = lambda: False
    ddp.main(["--quick", "--rounds", "1", "--steps", "2", "--out", str(path)])


def test_every_way_is_measured(tmp_path):
    run_ranks(quick, 2, tmp_path / "found.json", backend=None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["columns"]) == list(ddp.QUICK)
    for column in found["columns"].values():
        assert [row["run"] for row in column["rows"]] == [*ddp.WAYS, ddp.FLAT]
        assert all(row["wall_ms"] > 0 and row["gpu_ms"] is None for row in column["rows"])
        assert set(column["ratios"]) == set(ddp.GOALS)
    assert found["ranks"] == 2
    page = render.ddp(found)
    assert "None" not in page
    for name, column in found["columns"].items():
        assert f"| {name} | GPU ms |" in page
        assert f"{column['ratios']['delayed']:.3f}" in page
    assert f"| {ddp.FLAT} |" in page


def test_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc_per_node=2"):
        ddp.main([])
