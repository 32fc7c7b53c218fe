"""The depth of the call stack in a step: at most eight frames of fabricamp in four files below ``fit``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fabricamp
from fabricamp import habits
from fabricamp.strategies import DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

PACKAGE = str(Path(fabricamp.__file__).parent)


class Traced(Classifier):
    def training_step(self, batch, batch_idx):
        frame, self.frames = sys._getframe(1), []
        while frame is not None:
            self.frames.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        return super().training_step(batch, batch_idx)


def own_frames_below_fit(frames):
    names = [frame for frame in frames if frame[0].startswith(PACKAGE)]
    position = next(index for index, (_, name) in enumerate(names) if name == "fit")
    return names[:position], {path for path, _ in names[: position + 1]}


def frames_of_a_fit(strategy, precision, accumulate=1):
    module = Traced()
    options = {"strategy": strategy, "precision": precision, "accumulate_grad_batches": accumulate}
    if strategy != "single":
        options["devices"] = "auto"
    quiet_trainer(max_epochs=1, limit_val_batches=0, **options).fit(module, loader(8))
    below, files = own_frames_below_fit(module.frames)
    return len(below), len(files), below


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_single_process(precision, accumulate):
    frames, files, names = frames_of_a_fit("single", precision, accumulate)
    assert frames <= 8, names
    assert files <= 4, names


@pytest.mark.parametrize(
    "strategy", ["ddp", "delayed_ddp", DelayedDDP(message_size=1)], ids=["ddp", "delayed", "overlapped"]
)
def test_several_ranks(strategy):
    for frames, files, names in run_ranks(frames_of_a_fit, 2, strategy, "O1"):
        assert frames <= 8, names
        assert files <= 4, names


class BySteps(Classifier):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_no_step_asks_for_whom_the_program_was_written(optimizer, monkeypatch):
    calls = []

    class Counting:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(habits.NATIVE, name)

    monkeypatch.setattr(habits, "_present", Counting())
    counts = []
    for batches in (2, 6):
        calls.clear()
        quiet_trainer(max_epochs=1, limit_val_batches=0).fit(BySteps(optimizer), loader(4 * batches))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
