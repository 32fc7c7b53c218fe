"""The policy-gradient example: it plays episodes with the current weights, and the poles stay upright."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from fabricamp import Callback
from tests.small import quiet_trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "rl" / "train.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns the numbers in its last line that match ``pattern``."""

    def run(pattern, *arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--folder", "runs", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found = re.fullmatch(pattern, capsys.readouterr().out.splitlines()[-1])
        assert found
        return [float(number) for number in found.groups()]

    return run


PATTERN = r"mean return: ([\d.]+) in the first step, ([\d.]+) of 200 after training"


def test_the_short_form_doubles_the_return(run):
    first, after = run(PATTERN, "--quick")
    assert after > 2 * first
    assert list(Path("runs").rglob("*.ckpt"))
    assert len(next(Path("runs").rglob("metrics.csv")).read_text().splitlines()) == 16


def test_each_batch_is_played_with_the_weights_of_its_step():
    example = runpy.run_path(str(SCRIPT))
    policy, played = example["Policy"](), []

    class Recorded(example["Episodes"]):
        def __iter__(self):
            for batch in super().__iter__():
                played.append(policy.net[0].weight.clone())
                yield batch

    class Compared(Callback):
        same = 0

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            assert len(played) == batch_idx + 1
            self.same += torch.equal(played[-1], module.net[0].weight)

    compared = Compared()
    quiet_trainer(max_epochs=1, callbacks=compared).fit(policy, Recorded(policy, carts=2, batches=4))
    assert compared.same == 4


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    first, after = run(PATTERN)
    assert first < 30
    assert after > 195


def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run(PATTERN, "--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
