"""The examples with a loop of their own: they learn, go on from their files to the bit, and stay short."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from fabricamp import Loop

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_loop"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script in this process and folder; returns the lines that it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, "--folder", "runs", *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_each_has_less_than_120_lines():
    lines = {one.name: len(one.read_text().splitlines()) for one in EXAMPLES.glob("*.py")}
    assert lines.keys() == {"gpt.py", "gan.py", "rl.py"}
    assert max(lines.values()) < 120


def test_the_gpt_learns_and_goes_on_to_the_bit(run, monkeypatch):
    options = ("--steps", "12", "--batch-size", "4", "--every", "4")
    lines = run("gpt.py", *options)
    losses = [float(re.fullmatch(r"step \d+: loss [\d.]+, on other text ([\d.]+)", line)[1]) for line in lines]
    assert losses[-1] < losses[0]
    whole = torch.load("runs/last.ckpt", weights_only=True)["state_dict"]
    Path("runs/last.ckpt").unlink()

    class KilledError(Exception):
        """Ends the program after a save."""

    save = Loop.save

    def killed(loop, *arguments, **options):
        save(loop, *arguments, **options)
        if loop.global_step == 8:
            loop.wait()
            raise KilledError

    monkeypatch.setattr(Loop, "save", killed)
    with pytest.raises(KilledError):
        run("gpt.py", *options)
    monkeypatch.setattr(Loop, "save", save)
    assert run("gpt.py", *options)[-1] == lines[-1]
    again = torch.load("runs/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_gan_moves_points_into_clusters(run):
    lines = run("gan.py", "--quick")
    assert re.fullmatch(r"generated points: \d of 8 clusters, ([\d.]+)% of the points in a cluster", lines[-2])
    assert float(re.search(r"([\d.]+)%", lines[-2])[1]) > 10
    saved = torch.load("runs/last.ckpt", weights_only=True)
    assert len(saved["optimizer_states"]) == 2
    assert saved["global_step"] == 2 * 2 * 100
    assert [line for line in run("gan.py", "--quick") if line.startswith("epoch")] == []  # nothing is left to train


def test_the_poles_stay_upright(run):
    lines = run("rl.py", "--steps", "30")
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (lines[0], lines[2]))
    assert last > 2 * first
