"""The example of a GAN: two optimizers take turns in one step, and the generator learns all clusters."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.small import quiet_trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "gan" / "train.py"
PATTERN = r"(.+): (\d) of 8 clusters, ([\d.]+)% of the points in a cluster"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns the clusters and the percentage of each of its three lines."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found = [re.fullmatch(PATTERN, line) for line in capsys.readouterr().out.splitlines()[-3:]]
        return {match[1]: (int(match[2]), float(match[3])) for match in found}

    return run


def test_the_short_form_moves_points_into_clusters(run):
    result = run("--quick")
    assert result["real points"][0] == 8
    assert result["before training"] == (0, 0.0)
    assert result["after training"][1] > 15
    path = next(Path("runs").rglob("epoch=*.ckpt"))
    assert len(torch.load(path, weights_only=True)["optimizer_states"]) == 2


def test_each_optimizer_trains_its_own_network():
    example = runpy.run_path(str(SCRIPT))
    module = example["GAN"]()
    seen = []

    def remember(*_):
        seen.append({name: parameter.clone() for name, parameter in module.named_parameters()})

    remember()
    module.on_before_optimizer_step = remember
    quiet_trainer(max_steps=2, max_epochs=1).fit(module, [[example["real_points"](16)]])
    remember()
    initial, before_first, before_second, end = seen

    def changed(one, other):
        return {name.split(".")[0] for name in one if not torch.equal(one[name], other[name])}

    assert changed(initial, before_first) == set()
    assert changed(before_first, before_second) == {"discriminator"}
    assert changed(before_second, end) == {"generator"}


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    clusters, inside = run()["after training"]
    assert clusters == 8
    assert inside > 60


@pytest.mark.slow
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run("--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
