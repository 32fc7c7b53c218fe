"""The benchmarks of FP8 on a CPU: blocks and networks are built and trained, as on a GPU; their figures are for a GPU."""

from __future__ import annotations

import json
import threading
from multiprocessing import Pipe
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks import fp8_linears, fp8_losses, render

PICTURE = ("fp8_losses-h100-3e-4.json", "fp8_losses-h100.json")


@pytest.fixture
def _eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_eager")
def test_a_pass_in_bf16():
    fp8_linears.pass_of(32, 16, "bf16", torch.device("cpu"))()


@pytest.mark.usefixtures("_eager")
def test_the_process_of_a_size_makes_passes_in_bf16_and_by_each_recipe():
    pytest.importorskip("torchao", reason="needs the package torchao")
    own, other = Pipe()
    said = []

    def parent():
        said.append(own.recv())
        own.send("measure")
        said.append(own.recv())

    asks = threading.Thread(target=parent, daemon=True)
    asks.start()
    fp8_linears.worker(32, 16, 1, other)
    asks.join(timeout=60)
    assert said == ["ready", {"width": 32, "tokens": 16, "compiled": list(fp8_linears.KINDS)}]


def test_a_size_whose_process_failed_is_an_error():
    sizes = fp8_linears.sizes_of("32x16,64x16,64x32")
    rows = [{"width": 64, "tokens": 16}]
    with pytest.raises(SystemExit, match="not measured: 32x16, 64x32; the errors are above"):
        fp8_linears.check_rows(sizes, rows)
    fp8_linears.check_rows(sizes[1:2], rows)


def test_a_change_of_the_first_roundings_leads_to_other_losses_near_them():
    runs = [fp8_losses.Run(0, "bf16", change) for change in (0, 1)]
    first, changed = (fp8_losses.row_of(run, fp8_losses.QUICK, 3, 1e-3, "tensorwise") for run in runs)
    assert first["losses"] != changed["losses"]
    assert changed["final"] == pytest.approx(first["final"], rel=0.01)


def test_the_picture_of_the_losses_is_that_of_the_results():
    results = fp8_losses.HERE / "results"
    found = [json.loads((results / name).read_text()) for name in PICTURE]
    picture = (fp8_losses.HERE.parent / "docs" / "fp8-losses.svg").read_text()
    assert picture == fp8_losses.draw(found), "results have changed: make docs"
    lines = sum(len(result["rows"]) for result in found)
    assert len(ET.fromstring(picture).findall("{*}polyline")) == lines


def test_the_table_of_the_losses_has_gaps_to_the_run_of_the_same_seed():
    rows = [
        {"seed": seed, "kind": kind, "change": change, "final": final}
        for seed, kind, change, final in (
            (0, "bf16", 0, 1.0),
            (0, "fp8", 0, 1.01),
            (0, "bf16", 1, 0.98),
            (1, "bf16", 0, 2.0),
            (1, "fp8", 0, 1.99),
        )
    ]
    about = {"device": "a card", "peak": 0.1, "steps": 3, "recipe": "rowwise", "sizes": fp8_losses.QUICK._asdict()}
    page = render.fp8_losses({**about, "rows": rows})
    assert "| 0 | 1.0000 | +1.00% | -2.00% |" in page
    assert "| 1 | 2.0000 | -0.50% |  |" in page
