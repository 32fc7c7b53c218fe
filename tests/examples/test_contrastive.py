"""The contrastive example: without labels, the embeddings of equal digits become neighbours."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.small import quiet_trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "contrastive" / "train.py"


@pytest.fixture(autouse=True)
def _needs_sklearn():
    pytest.importorskip("sklearn", reason="needs the package sklearn")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns its accuracies before and after training, in percent."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return [float(number) for number in re.findall(r"k-NN accuracy .*: ([\d.]+)%", capsys.readouterr().out)]

    return run


def test_the_short_form_learns_without_labels(run):
    before, after = run("--quick")
    assert after > before + 1
    assert list(Path("runs").rglob("*.ckpt"))
    assert list(Path("runs").rglob("events.*"))


def test_the_metric_is_that_of_all_batches_together():
    module = runpy.run_path(str(SCRIPT))["SimCLR"]()
    module.encoder = torch.nn.Flatten()
    images = torch.eye(10).repeat(30, 1).view(300, 1, 10)
    digits = torch.arange(10).repeat(30)
    digits[270:] = 0  # the last ten samples are different; one of them is a zero
    data = torch.utils.data.TensorDataset(images, digits)
    labelled = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(40)), batch_size=7)
    others = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(200, 300)), batch_size=64)
    results = quiet_trainer().validate(module, [labelled, others], verbose=False)
    assert results[0]["knn_accuracy"] == pytest.approx(0.73)


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    before, after = run()
    assert before < 85
    assert after > 89


@pytest.mark.slow
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run("--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
