"""The benchmark beside torchtitan: both train, over the same tokens, and tell the same figures; ratios are those of like ways."""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks import titan


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs the package torchtitan")
def test_both_train_and_tell_the_same_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ways = ["torchtitan", "fabricamp", "fabricamp head"]
    options = ["--quick", "--processes", "2", "--steps", "4", "--accumulation", "2", "--segments", "plain"]
    titan.main([*options, "--ways", *ways, "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["way"] for row in found["rows"]] == ways
    first = found["rows"][0]
    for row in found["rows"]:
        assert list(row) == list(first)
        assert len(row["losses"]) == 4
        assert row["losses"][0] == pytest.approx(first["losses"][0], abs=0.7)  # first values are drawn anew by each
        assert row["tokens_s_gpu"] == row["rounds"][0] > 0
    assert [row["way"] for row in found["ratios"]] == ways[1:]


def test_samples_of_a_rank_are_the_same_in_both_ways():
    work = titan.Work(steps=2, batch=3, accumulation=2, quick=True)
    data = titan.Samples(work, words=50, ranks=2)
    assert len(data) == 2 * 3 * 2 * 2
    tokens, labels = data[titan.ROWS + 5]
    assert tokens.equal(data[5][0])
    assert labels[:-1].equal(tokens[1:])
    assert tokens.shape == (work.length,)


def test_ratios_compare_like_products_and_segments():
    figures = {"tokens_s_gpu": 100, "allocated_gib": 8.0, "reserved_gib": 10.0, "device_gib": 0.0}
    rows = [
        {"way": "torchtitan", "segments": "plain", **figures},
        {"way": "torchtitan fp8", "segments": "plain", **figures, "tokens_s_gpu": 200},
        {"way": "fabricamp", "segments": "plain", **figures, "reserved_gib": 9.0},
        {"way": "fabricamp", "segments": "expandable", **figures},
        {"way": "fabricamp fp8", "segments": "plain", **figures},
        {"way": "fabricamp head", "segments": "plain", "failed": 1},
    ]
    assert titan.ratios(rows) == [
        {"way": "fabricamp", "segments": "plain", "to": "torchtitan"}
        | {"tokens_s_gpu": 1.0, "allocated_gib": 1.0, "reserved_gib": 0.9},
        {"way": "fabricamp fp8", "segments": "plain", "to": "torchtitan fp8"}
        | {"tokens_s_gpu": 0.5, "allocated_gib": 1.0, "reserved_gib": 1.0},
    ]


def test_a_row_is_the_run_with_the_median_rate_and_a_failed_run_is_kept_only_alone():
    runs = [{"tokens_s_gpu": 5}, {"failed": 1}, {"tokens_s_gpu": 9}, {"tokens_s_gpu": 7}]
    assert titan.summary("plain", "fabricamp", runs) == {
        "way": "fabricamp",
        "segments": "plain",
        "tokens_s_gpu": 7,
        "rounds": [5, None, 9, 7],
    }
    assert titan.summary("plain", "fabricamp", [{"failed": 1}])["failed"] == 1
