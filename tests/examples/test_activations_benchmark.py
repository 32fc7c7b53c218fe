"""The benchmark of activations: a row in this process, and what is told of rows."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import activations


@pytest.mark.parametrize("name", ["1 x 8192, a quarter offloaded", "1 x 32768, inputs offloaded"])
def test_a_row_has_the_losses_of_the_row_beside_it(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = {}
    for one in (activations.RATIOS[name][0], name):
        activations.main(["--quick", "--length", "64", "--steps", "1", "--row", one])
        rows[one] = json.loads(capsys.readouterr().out.splitlines()[-1])
    activations.compare(name, rows)
    assert rows[name]["equal"]
    assert rows[name]["ratio"] > 0
    assert rows[name]["tokens"] == 64
    assert f"x {activations.RATIOS[name][0]} (goal" in activations.line(name, rows)
    rows[name]["failed"] = "no memory"
    assert activations.line(name, rows) == f"{name}: failed: no memory"


def test_what_the_file_has_is_left_out(tmp_path, capsys):
    out = tmp_path / "activations.json"
    out.write_text(json.dumps({"rows": {name: {"failed": "before"} for name in activations.ROWS}}))
    activations.main(["--out", str(out)])
    assert capsys.readouterr().out == ""
    assert all(
        beside in activations.ROWS and name in activations.ROWS for name, (beside, _) in activations.RATIOS.items()
    )
