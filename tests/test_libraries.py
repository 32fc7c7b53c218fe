"""The runner of tests/libraries compares all output of two runs; its libraries have versions, and rows in the page."""

import math
import sys
from pathlib import Path

import pytest
import torch

LIBRARIES = str(Path(__file__).parent / "libraries")


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(LIBRARIES)
    import compare
    import run

    yield run, compare
    del sys.modules["compare"], sys.modules["run"]


def written(folder, rows, weights, predictions):
    folder.mkdir()
    torch.save({"rows": rows, "weights": weights}, folder / "training-0.pt")
    torch.save(predictions, folder / "predictions.pt")
    return folder


ROWS = [{"where": "step", "step": 1, "loss": 2.0, "other": math.nan}]
WEIGHTS = {"a": torch.tensor([0.0, 4.0])}


def test_equal_runs_have_no_difference(runner, tmp_path):
    _, compare = runner
    folders = [written(tmp_path / name, ROWS, WEIGHTS, [torch.ones(2)]) for name in "ab"]
    difference = compare.compared(*folders)
    assert (difference.largest, difference.over) == (0.0, 0)
    assert difference.numbers == 5  # step, loss, other, the weight, the prediction


@pytest.mark.parametrize(
    ("rows", "weights", "predictions", "largest"),
    [
        ([{**ROWS[0], "loss": 2.001}], WEIGHTS, [torch.ones(2)], 0.001 / 2.001),
        (ROWS, {"a": torch.tensor([0.004, 4.0])}, [torch.ones(2)], 0.001),
        ([{**ROWS[0], "more": 1.0}], WEIGHTS, [torch.ones(2)], math.inf),
        ([{**ROWS[0], "other": 1.0}], WEIGHTS, [torch.ones(2)], math.inf),
        (ROWS * 2, WEIGHTS, [torch.ones(2)], math.inf),
        (ROWS, WEIGHTS, [torch.ones(3)], math.inf),
        (ROWS, {"a": torch.tensor([0.0, math.nan])}, [torch.ones(2)], math.inf),
    ],
)
def test_differences_are_found(rows, weights, predictions, largest, runner, tmp_path):
    _, compare = runner
    one = written(tmp_path / "a", ROWS, WEIGHTS, [torch.ones(2)])
    other = written(tmp_path / "b", rows, weights, predictions)
    assert compare.compared(one, other).largest == pytest.approx(largest)


def test_a_file_of_one_run_alone_is_a_difference(runner, tmp_path):
    _, compare = runner
    folders = [written(tmp_path / name, ROWS, WEIGHTS, [torch.ones(2)]) for name in "ab"]
    (folders[1] / "predictions.pt").unlink()
    assert compare.compared(*folders).largest == math.inf


def test_each_library_has_its_version_and_its_row(runner):
    run, _ = runner
    rows = {name for name, *_ in run.ROW.findall(run.PAGE.read_text())}
    assert rows == set(run.LIBRARIES)
    for name in run.LIBRARIES:
        assert f"| {name} | {run.version(name)} |" in run.PAGE.read_text()
