"""The benchmark of bits on a CPU: it finds what differs, writes its file, and the page reads it; its figures are for a GPU."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from benchmarks import bits, render


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
    assert "| softmax | 512 | bf16 | every |  |" in page
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
