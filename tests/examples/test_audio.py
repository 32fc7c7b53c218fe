"""The audio example: it classifies five instruments by spectrograms that the model computes from waves."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "audio" / "train.py"


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


PATTERN = r"accuracy on (\d+) sounds that training never heard: ([\d.]+)%"


def test_the_short_form_is_three_times_as_good_as_a_guess(run):
    count, accuracy = run(PATTERN, "--quick")
    assert count == 100
    assert accuracy > 60
    assert list(Path("runs").rglob("*.ckpt"))


def test_a_tone_is_where_its_frequency_is():
    example = runpy.run_path(str(SCRIPT))
    spectrogram = example["Listener"]().spectrogram((2 * torch.pi * 1000 * example["TIME"]).sin()[None])
    assert spectrogram.shape == (1, 129, 32)
    assert spectrogram[0].mean(dim=1).argmax() == 1000 / (8000 / 256)


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    _, accuracy = run(PATTERN)
    assert accuracy > 95


@pytest.mark.slow  # trains a second time
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run(PATTERN, "--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 100_000
