"""The segmentation example: all labelled pixels of a step have the same weight, and the U-Net finds the shapes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.small import quiet_trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "segmentation" / "train.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns the mean IoU before and after training."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return [float(number) for number in re.findall(r"mean IoU \w+ training: ([\d.]+)", capsys.readouterr().out)]

    return run


def test_the_short_form_raises_the_iou(run):
    before, after = run("--quick")
    assert after > 1.5 * before
    assert list(Path("runs").rglob("epoch=*.ckpt"))


def test_accumulated_batches_give_the_mean_over_all_labelled_pixels():
    example = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    images, masks = example["shapes"](4)
    masks = example["partly_labelled"](masks)
    module = example["Segmenter"]().double()
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.momentum = 0.0
    images = images.double()
    scores = torch.cat([module.net(images[:1]), module.net(images[1:])])
    F.cross_entropy(scores, masks, ignore_index=example["UNLABELLED"]).backward()
    expected = module.net.head.weight.grad.clone()
    module.zero_grad()
    found = []
    module.on_before_optimizer_step = lambda _: found.append(module.net.head.weight.grad.clone())
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, [[images[:1], masks[:1]], [images[1:], masks[1:]]])
    torch.testing.assert_close(found, [expected])


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    before, after = run()
    assert before < 0.3
    assert after > 0.75


@pytest.mark.slow
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run("--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
