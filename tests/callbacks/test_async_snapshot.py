"""AsyncCheckpoint copies all as it is at the save: no writer of the next step may be ahead of it.

``free_memory`` stands for the GPU's, by which it clones.  The copies are slowed down, so that a writer would be ahead of them.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, CheckpointError, TrainingModule
from fabricamp.callbacks import EMA, AsyncCheckpoint, ModelCheckpoint, _checkpoint_files
from fabricamp.checkpoint import background, read_checkpoint
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

WIDTH = 160  # a weight has 100 kB: more than what is copied at once


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Slows each copy down; returns their sizes."""
    copies = []
    real = background._Later.copy

    def copy(later, **options):
        if later.source.device.type == "cuda":
            torch.cuda._sleep(5_000_000)  # on the stream of the copy
        copies.append(later.source.nbytes())
        real(later, **options)

    monkeypatch.setattr(background._Later, "copy", copy)
    monkeypatch.setattr(_checkpoint_files, "secrets", SimpleNamespace(token_hex=lambda size: "0" * 2 * size))
    return copies


class Gan(TrainingModule):
    """Two networks with an optimizer each, batch norm, and spectral norm."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)
        )

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        real = F.pad(batch[0], (0, WIDTH - 8))
        made = self.generator(torch.randn(len(real), 8, device=real.device))
        loss = self.critic(real).mean() - self.critic(made.detach()).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        loss = self.critic(made).mean()
        self.manual_backward(loss)
        second.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.critic.parameters()), torch.optim.AdamW(self.generator.parameters())


class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)
        )

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Clamped(Net):
    """Edits weights where a batch begins, by a way that torch does not count as a change."""

    def on_train_batch_start(self, batch, batch_idx):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class Scaled(Net):
    """Edits weights in the training step."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), 0.99)
            self.net[2].weight[0] = 0.0
        return super().training_step(batch, batch_idx)


class Reloads(Callback):
    """Loads weights and an optimizer's state in a hook."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()})
        for state in trainer.optimizers[0].state.values():
            state["exp_avg"].zero_()


def contents(folder, kind, module, callbacks=(), batches=50, **options):
    """Returns the bytes of the files that a fit with a save at each batch writes."""
    named = type("Named", (kind,), {"state_key": "checkpoint"})
    checkpoint = named(folder, every_n_train_steps=1, save_top_k=-1, monitor="step", filename="{step}")
    torch.manual_seed(0)
    trainer = quiet_trainer(
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[*callbacks, checkpoint],
        **options,
    )
    trainer.fit(module(), loader(4 * batches), loader(8))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    return files


def check(folder, module, callbacks=lambda: (), batches=50, **options):
    one, other = (
        contents(folder, kind, module, callbacks(), batches, **options) for kind in (ModelCheckpoint, AsyncCheckpoint)
    )
    assert len(one) == batches
    assert one.keys() == other.keys()
    different = [name for name, content in one.items() if content != other[name]]
    assert not different


def test_fifty_saves_of_a_gan_with_averages_are_those_of_the_synchronous_ones(tmp_path, slow):
    check(tmp_path, Gan, lambda: [EMA(0.9)])
    assert len(slow) >= 50 * 4  # two large weights with two states each, less those that share memory


@pytest.mark.parametrize(
    ("module", "precision"), [(Net, "O0"), (Net, "O2"), (Scaled, "O0"), (Scaled, "O2"), (Clamped, "O0")]
)
def test_no_writer_is_ahead_of_the_copies(tmp_path, module, precision):
    check(tmp_path, module, batches=10, precision=precision)


def test_neither_are_loads_and_swaps_of_averages(tmp_path):
    check(tmp_path, Net, lambda: [Reloads(), EMA(0.9)], batches=10, val_check_interval=1)


def test_neither_are_accumulation_and_clipping(tmp_path):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    one, other = (contents(tmp_path, kind, Net, batches=20, **options) for kind in (ModelCheckpoint, AsyncCheckpoint))
    assert one == other


@pytest.mark.gpu
@pytest.mark.parametrize("device_memory", [0, 250_000, 10**9])
@pytest.mark.parametrize("options", [{}, {"precision": "O5"}, {"precision": "O2"}, {"cuda_graph": True}])
def test_on_a_gpu_no_writer_is_ahead_of_the_copies(tmp_path, monkeypatch, slow, device_memory, options):
    monkeypatch.setattr(background, "free_memory", lambda device: device_memory)
    check(tmp_path, Net, lambda: [EMA(0.9)], batches=20, accelerator="gpu", **options)
    assert slow


@pytest.mark.gpu
def test_fifty_saves_of_a_gan_on_a_gpu(tmp_path):
    check(tmp_path, Gan, lambda: [EMA(0.9)], accelerator="gpu")


def test_a_copy_that_fails_fails_the_save_and_lets_training_go_on(tmp_path, monkeypatch):
    def fails(later, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(background._Later, "copy", fails)
    with pytest.raises(CheckpointError, match="no memory"):
        contents(tmp_path, AsyncCheckpoint, Net, batches=5)


PHASES = ("take", "copy", "write", "rename")


def killed(folder, phase):
    """Trains until the third save, and is killed there."""
    calls = []

    def dies_at_third(real):
        def call(*args, **options):
            calls.append(0)
            if len(calls) == 3 or (phase == "copy" and len(calls) == 8):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    owner, name = {
        "take": (background.HostCopy, "take"),
        "copy": (background._Later, "copy"),
        "write": (os, "fsync"),
        "rename": (type(folder), "replace"),
    }[phase]
    setattr(owner, name, dies_at_third(getattr(owner, name)))
    contents(folder, AsyncCheckpoint, Net, batches=10)


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_each_phase_leaves_files_of_the_synchronous_ones(tmp_path, phase):
    expected = contents(tmp_path / "whole", ModelCheckpoint, Net, batches=10)
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(killed, 1, tmp_path / "killed", phase, backend=None)
    left = sorted((tmp_path / "killed").glob("*.ckpt"))
    assert left or phase in ("take", "copy")
    for file in left:
        weights = read_checkpoint(file)["state_dict"]
        (tmp_path / "one.ckpt").write_bytes(expected[file.name])
        for key, value in read_checkpoint(tmp_path / "one.ckpt")["state_dict"].items():
            assert torch.equal(weights[key], value)
