"""Checkpoints of an earlier version that two ranks wrote as folders: runs go on from them.

``checkpoints/`` holds them, named by the commit that wrote them: ``python -m tests.earlier_versions.test_92a6732 FOLDER NAME``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import Callback, TrainingModule
from fabricamp.checkpoint import read_checkpoint
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.small import data, quiet_trainer

FILES = Path(__file__).parent / "checkpoints"
CUT_AT, STEPS = 5, 6


class Net(TrainingModule):
    """One layer, Adam; notes what it reads."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(24).reshape(3, 8) / 100)
            self.net.bias.zero_()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0][:, 0].tolist())
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


class Cut(Callback):
    """Writes a checkpoint behind a micro-batch, in the middle of a window where steps have several."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == CUT_AT:
            trainer.save_checkpoint(self.path)
            self.seen = len(pl_module.seen)


class Begins(Callback):
    """Writes what a run has that goes on, before its first batch."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step
        trainer.save_checkpoint(self.path)


def sharded(path, ckpt_path=None):
    """A fit of two ranks that hold shards."""
    module = Net()
    trainer = quiet_trainer(
        devices="auto",
        strategy="fsdp",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_steps=STEPS,
        callbacks=[Cut(path) if ckpt_path is None else Begins(path)],
        default_root_dir=Path(path).parent,
    )
    trainer.fit(module, DataLoader(data(48), 4, shuffle=True), ckpt_path=ckpt_path)
    weight = module.net.weight.detach().clone()
    return module.seen, trainer.callbacks[0], trainer.global_step, None if weight.is_meta else weight  # rank 0 has it


def assert_goes_on(straight, resumed, restored, file):
    (seen, cut, steps, weights), (rest, begins, same_steps, same_weights) = straight, resumed
    assert rest == seen[cut.seen :]  # the same samples in the same order, from where it was cut
    assert steps == same_steps == STEPS
    torch.testing.assert_close(same_weights, weights, rtol=0, atol=1e-3)  # computed on another machine up to the cut
    written, found = read_checkpoint(file), read_checkpoint(restored)
    assert found["global_step"] == written["global_step"] == begins.step
    for name in ("state_dict", "optimizer_states", "current_model_state", "averaging_state"):
        assert (name in written) == (name in found)
        if name in written:
            torch.testing.assert_close(found[name], written[name], rtol=0, atol=0)
    return written, found


def two_fits(folder, file):
    torch.manual_seed(3)
    straight = sharded(folder / "cut.ckpt")
    torch.manual_seed(4)
    return straight, sharded(folder / "restored.ckpt", file)


@pytest.mark.parametrize("file", sorted(FILES.glob("*-fsdp.ckpt")), ids=lambda file: file.stem)
def test_a_run_of_shards_goes_on(file, tmp_path):
    shutil.copytree(file, tmp_path / "file.ckpt")
    ranks = run_ranks(two_fits, 2, tmp_path, tmp_path / "file.ckpt", backend=None)
    for straight, resumed in ranks:
        (seen, cut, _, _), (rest, _, steps, _) = straight, resumed
        assert rest == seen[cut.seen :]
        assert steps == STEPS
    written, found = assert_goes_on(*ranks[0], tmp_path / "restored.ckpt", file)
    window, same = (state["loops"]["fit"]["accumulation"] for state in (written, found))
    assert window["accumulate"] == same["accumulate"] == 2
    torch.testing.assert_close(same["gradients"], window["gradients"], rtol=0, atol=0)
    assert sum(one.stat().st_size for one in file.rglob("*") if one.is_file()) < 90_000


def test_there_are_files():
    assert {one.name.partition("-")[2] for one in FILES.iterdir()} == {"fsdp.ckpt"}


def write(folder, name):
    folder.mkdir(exist_ok=True)

    def write_shards():
        torch.manual_seed(3)
        sharded(folder / f"{name}-fsdp.ckpt")

    run_ranks(write_shards, 2, backend=None)


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute(), sys.argv[2])
