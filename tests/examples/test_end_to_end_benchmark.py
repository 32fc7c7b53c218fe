"""The end-to-end benchmark runs, compares equal trainings, and is rendered; its figures are for a GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end, render


@pytest.fixture(autouse=True)
def _as_it_was():
    precision, level = torch.get_float32_matmul_precision(), logging.getLogger("fabricamp").level
    yield
    torch.set_float32_matmul_precision(precision)
    logging.getLogger("fabricamp").setLevel(level)


def test_every_run_is_measured_and_rendered(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    end_to_end.main(["--quick", "--rounds", "1", "--steps", "3", "--curves", "20", "--out", "found.json"])
    found = json.loads(Path("found.json").read_text())
    assert [row["run"] for row in found["rows"]] == list(end_to_end.RUNS)
    assert all(row["wall_ms"] > 0 and row["goal_ms"] is None for row in found["rows"])
    gaps = {row["run"]: row["largest_gap"] for row in found["curves"]["rows"]}
    assert gaps["fabricamp O0"] < 1e-3
    # O1 and O2 skip the first steps, until the loss scale fits: of twenty steps that is as much as other weights.
    with_scale = {gaps.pop(f"fabricamp {level}") for level in ("O1", "O2")}
    assert max(gaps.values()) == gaps["torch fp32, other weights"]
    assert max(with_scale) < 2 * gaps["torch fp32, other weights"]
    assert all(len(row["losses"]) == 20 for row in found["curves"]["rows"])
    page = render.end_to_end(found)
    assert "None" not in page
    for name in (*end_to_end.RUNS, *(row["run"] for row in found["curves"]["rows"])):
        assert f"| {name} |" in page
    assert "fabricamp O5" in capsys.readouterr().out


def test_the_goals_name_runs():
    assert set(end_to_end.GOALS) <= set(end_to_end.RUNS)


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--quick"):
        end_to_end.main([])


def test_the_clock_measures_the_steps_behind_the_warm_up(tmp_path):
    setting = end_to_end.Setting(end_to_end.TINY, torch.device("cpu"), 2, 3, str(tmp_path))
    clock = end_to_end.Clock(setting)
    for _ in setting.loader():
        assert clock.result is None
        clock.tick()
    assert clock.result.wall_ms > 0


def test_nothing_is_saved_in_a_run_through_the_trainer(tmp_path):
    setting = end_to_end.Setting(end_to_end.TINY, torch.device("cpu"), 1, end_to_end.FLUSH_EVERY, str(tmp_path))
    end_to_end.through_the_trainer(setting, level="O0")
    assert list(tmp_path.rglob("events.*"))
    assert not list(tmp_path.rglob("*.ckpt*"))
