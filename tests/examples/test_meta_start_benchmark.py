"""The benchmark of starts from the meta device: it runs in both ways, and tells the same stages."""

from __future__ import annotations

import json

import pytest

from benchmarks import meta_start


def test_both_ways_tell_their_stages(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    meta_start.main(["--quick", "--rounds", "1", "--processes", "2", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["network"], row["way"]) for row in found["rows"]] == [("own", way) for way in meta_start.WAYS]
    for row in found["rows"]:
        median = row["median"]
        assert list(median) == [*meta_start.STAGES, "without_import"]
        assert all(median[stage] > 0 for stage in ("import", "step"))  # the tiny network is built in no time
        assert median["without_import"] == pytest.approx(
            sum(median[stage] for stage in meta_start.STAGES[1:]), abs=0.02
        )
    assert found["processes"] == 2
