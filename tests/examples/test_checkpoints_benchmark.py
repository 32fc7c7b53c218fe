"""The benchmark of checkpoints at a small size on a CPU: every figure is there, for fabricamp and for torch's DCP."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import checkpoints


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


SMALL = ["--gb", "0.003", "--batch", "4", "--steps", "24"]


def check_saves(row):
    assert row["first_save"]["seconds"] > 0
    assert row["later_save"]["ratio"] > 0
    assert row["write_gb_per_s"] > 0
    assert len(row["write_seconds"]) == 2


def test_every_figure_is_measured(tmp_path, capsys):
    out = tmp_path / "found.json"
    checkpoints.main(
        [*SMALL, "--ways", "fabricamp-async", "--ranks", "1", "--folder", str(tmp_path), "--out", str(out)]
    )
    found = json.loads(out.read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["copy"]["grown_gb_per_s"] > 0
    assert found["about"]["parameters"] == pytest.approx(0.003e9 / 12, rel=0.2)
    row = found["ways"]["fabricamp-async"]
    check_saves(row)
    assert row["load"]["seconds"] > 0
    assert row["restart"]["1"]["seconds"] > 0
    assert os.listdir(tmp_path) == ["found.json"]  # noqa: PTH208 - names


@pytest.mark.parametrize("way", ["fabricamp", "dcp", "dcp-thread"])
def test_each_way_saves_and_restarts(tmp_path, capsys, way):
    def result(measure, file):
        checkpoints.main([*SMALL, "--measure", measure, "--file", str(file)])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(checkpoints.MARK)]
        return json.loads(line.removeprefix(checkpoints.MARK))

    check_saves(result(f"save:{way}", tmp_path))
    assert result(f"load:{way}", checkpoints.newest(tmp_path))["gb_per_s"] > 0
    assert result(f"restart:{way}:1", checkpoints.newest(tmp_path))["seconds"] > 0


def test_an_unknown_way_is_refused(capsys):
    with pytest.raises(SystemExit):
        checkpoints.main(["--ways", "fabricamp,dcp-threads"])
    assert "dcp-threads unknown; known: fabricamp, fabricamp-async" in capsys.readouterr().err
