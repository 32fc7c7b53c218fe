"""How far a batch travels: at most eight of our own frames in four files below ``fit``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fabricamp
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
