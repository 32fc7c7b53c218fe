"""The diffusion example: it draws digits from noise, and better digits with the average of the weights."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "diffusion" / "train.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns its three distances: untrained, last weights, average."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        lines = [line for line in capsys.readouterr().out.splitlines() if re.search(r": [\d.]+$", line)]
        return [float(line.rsplit(": ", 1)[1]) for line in lines]

    return run


def test_the_short_form_moves_towards_the_digits_and_saves_both_weights(run):
    untrained, latest, averaged = run("--quick")
    assert latest < untrained / 3
    assert averaged < untrained / 3
    path = next(Path("runs").rglob("epoch=*.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"].keys() == checkpoint["current_model_state"].keys()
    assert not torch.equal(
        checkpoint["state_dict"]["net.last.bias"], checkpoint["current_model_state"]["net.last.bias"]
    )


def test_the_distance_of_a_set_from_itself_is_zero_and_a_shift_adds_its_square():
    distance = runpy.run_path(str(SCRIPT))["frechet_distance"]
    points = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    assert distance(points, points) == pytest.approx(0, abs=1e-6)
    assert distance(points, points + 0.5) == pytest.approx(64 * 0.25, abs=1e-4)


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    untrained, latest, averaged = run()
    assert untrained > 40
    assert averaged < latest
    assert averaged < 1.7


@pytest.mark.slow
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run("--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
