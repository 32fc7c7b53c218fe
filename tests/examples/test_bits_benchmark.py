"""The benchmark of bits on a CPU: it finds what differs, writes its file, and the page reads it; its figures are for a GPU."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bits, render

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def measured():
    return json.loads((render.HERE / "results" / "bits-h200.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("bits") / "bits-cpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "argv", ["benchmarks/bits.py", "--quick", "--out", str(path)])
        bits.main()
    return json.loads(path.read_text())


def of_part(found, part):
    return [row for row in found["rows"] if row["part"] == part]


def test_every_part_is_measured(found):
    attentions = of_part(found, "attention")
    assert {(row["dtype"], row["backend"]) for row in attentions} == {
        (dtype, backend) for dtype in ("bf16", "fp16", "fp32") for backend in bits.BACKENDS
    }
    for row in attentions:
        if row["backend"] in ("flash", "math"):  # those that a CPU has
            assert row["default"] == row["deterministic"] == dict.fromkeys(("dq", "dk", "dv", "forward"), 0)
            assert row["cost"] > 0
        else:
            assert row["default"]["refused"] == row["deterministic"]["refused"]
    assert {row["operation"] for row in of_part(found, "batch")} == {
        "F.linear", "F.linear with bias", "F.layer_norm", "fabricamp's layer_norm", "F.rms_norm", "fabricamp's rms_norm",
        "softmax", "log_softmax", "sum", "mean", "norm",
    }  # fmt: skip
    for row in of_part(found, "batch"):
        assert sorted(m for group in row["groups"] for m in group) == [1, *bits.QUICK.rows]
    assert [row["rows"] for row in of_part(found, "rms_norm")] == [64]
    assert found["torch"] == torch.__version__
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_page_has_a_table_for_each_part(found):
    page = render.section("bits-cpu", found)
    assert page.startswith("## Which bits repeat, and which depend on the batch, on CPU\n")
    assert "| 2 x 2 x 64 x 32 | bf16 | math | all | all |" in page
    assert "| 2 x 2 x 64 x 32 | bf16 | cudnn | refused | refused |  |  |  |" in page
    assert "| softmax | 512 | bf16, fp16, fp32 | every |  |" in page
    assert "| rows x width | torch: forward |" in page
    assert "None" not in page
    some = {**found, "rows": of_part(found, "batch")}
    assert "rows x width" not in render.section("bits-cpu", some)


def test_what_differs_on_a_gpu_is_told():
    row = {
        "part": "attention", "size": "1", "dtype": "bf16", "backend": "flash", "runs": 30,
        "default": {"dq": 29, "dk": 0, "dv": 3, "forward": 0}, "deterministic": {"refused": "no kernel"}, "default_ms": 1.5,
    }  # fmt: skip
    assert render.attention_bits(row) == ["1", "bf16", "flash", "not in dq 29, dv 3", "refused", "1.500", "", ""]
    groups = [[1, 16], [2, 4, 8], [32, 64]]
    assert render.batch_bits({"operation": "it", "shape": "8", "dtype": "fp16", "groups": groups})[3:] == [
        "1, 16",
        "2 to 8; 32 to 64",
    ]


def test_results_that_depend_on_the_number_of_rows_are_found():
    rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float32)

    def run(some):
        return some * (1.0 if len(some) < 8 else 1.0 + 2**-23)

    assert bits.groups_of_bits(run, rows, (2, 4, 8, 64)) == [[1, 2, 4], [8, 64]]
    assert bits.groups_of_bits(lambda some: some.sum(-1), rows, (2, 64)) == [[1, 2, 64]]


def test_runs_with_other_bits_are_counted():
    runs = iter(range(6))

    def repeat():
        return torch.ones(3), torch.tensor([1.0, 2.0 if next(runs) % 3 == 2 else 1.0])

    assert bits.differing((torch.ones(3), torch.ones(2)), repeat, 6) == [0, 2]


def test_bits_are_compared_not_values():
    assert not bits.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert bits.same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert bits.same_bits(torch.tensor(1.0).bfloat16(), torch.ones((), dtype=torch.bfloat16))


def spread(values, digits):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f} times"


def test_pages_have_the_figures_of_the_result(measured):
    def on_page(name):
        return re.sub(r"\s+", " ", (DOCS / name).read_text())

    page = on_page("how-to/reproducibility.md")
    where = f"NVIDIA H200, torch {measured['torch']}, {measured['date']}"
    assert where in page
    assert where in on_page("kernels.md")
    rows = {(row["size"], row["dtype"], row["backend"]): row for row in of_part(measured, "attention")}
    cost = {
        name: [row["cost"] for row in rows.values() if row["backend"] == name and "cost" in row]
        for name in bits.BACKENDS
    }
    assert f"{spread(cost['flash'], 2)} as long by flash, and {spread(cost['efficient'], 2)} by the memory" in page
    over_cudnn = [
        rows[size, dtype, "flash"]["deterministic_ms"] / row["default_ms"]
        for (size, dtype, backend), row in rows.items()
        if backend == "cudnn" and "default_ms" in row
    ]
    assert f"flash's deterministic backward takes {spread(over_cudnn, 1)} cuDNN's" in page
    norms = of_part(measured, "rms_norm")
    for name, words in {"torch": "as long as after `fabricamp.nn.fuse(model)`", "bf16": "as long"}.items():
        gain = spread([row[f"{name}_both_ms"] / row["fused_both_ms"] for row in norms], 1)
        assert f"{gain} {words}" in on_page("how-to/precision.md")
        assert gain in on_page("kernels.md")


def test_pages_say_what_repeats_as_measured(measured):
    """The sentences of docs/how-to/reproducibility.md, which name no figure."""
    attention = [row for row in of_part(measured, "attention") if "refused" not in row["default"]]
    assert all(row["default"][name] == 0 for row in attention for name in ("forward", "dk", "dv"))
    assert {row["backend"] for row in attention if row["default"]["dq"]} == {"flash", "efficient", "cudnn"}
    assert {row["backend"] for row in attention if "refused" in row["deterministic"]} == {"cudnn"}
    assert not any(count for row in attention for count in row["deterministic"].values() if isinstance(count, int))
    for row in of_part(measured, "batch"):
        half = row["dtype"] in ("bf16", "fp16")
        inputs, _, outputs = row["shape"].partition(" to ")
        depends = len(row["groups"]) > 1
        if outputs and half:
            assert not depends or (int(inputs) > 768 and int(outputs) <= 4096)
        elif outputs:
            assert row["groups"][0] == [1]
        elif row["operation"] in ("F.layer_norm", "F.rms_norm", "softmax", "log_softmax"):
            assert not depends
        elif row["operation"] in ("sum", "mean"):
            assert depends == (not half)
        elif row["operation"].startswith("fabricamp"):
            assert not depends or row["dtype"] == "fp32" or (row["dtype"], row["shape"]) == ("fp16", "8192")


def test_rows_that_differ_in_one_cell_are_one_row():
    rows = [["a", "1", "x"], ["a", "2", "x"], ["b", "1", "x"], ["a", "1", "y"]]
    assert render.merged(rows, 1) == [["a", "1, 2", "x"], ["b", "1", "x"], ["a", "1", "y"]]
