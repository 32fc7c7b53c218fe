"""A folder in which one rank finds damage is refused by all ranks, and under "auto" all go on from the older one."""

from __future__ import annotations

import shutil

import pytest
import torch

from fabricamp import Callback, CheckpointError
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Adam(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Began(Callback):
    def on_train_start(self, trainer, module):
        self.step = trainer.global_step


def fit(folder, steps, kind=ModelCheckpoint, strategy="fsdp", devices=2, **options):
    """Trains with a checkpoint at every second step; returns the step at which training began."""
    began = Began()
    files = kind(dirpath=folder, every_n_train_steps=2, save_top_k=-1, monitor="step")
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[files, began],
        enable_checkpointing=True,
    )
    trainer.fit(Adam(), loader(32), **options)
    return began.step


def file_of(folder, step, name):
    return next(folder.glob(f"*step={step}.ckpt/shards-*/{name}"))


def flip_a_flag(file):
    """Makes the first directory entry say that its member is encrypted."""
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] ^= 1
    file.write_bytes(content)


def exchanged(folder, name):
    newest = file_of(folder, 4, name)
    newest.write_bytes(file_of(folder, 2, name).read_bytes())


DAMAGES = {
    "a flag on rank 0": lambda folder: flip_a_flag(file_of(folder, 4, "__0_0.distcp")),
    "a flag on rank 1": lambda folder: flip_a_flag(file_of(folder, 4, "__1_0.distcp")),
    "the older file of rank 0": lambda folder: exchanged(folder, "__0_0.distcp"),
    "the older file of rank 1": lambda folder: exchanged(folder, "__1_0.distcp"),
}


def on_two_ranks(folder):
    """Returns what each rank saw: the step at which "auto" began, and the error of the path."""
    newest = next(folder.glob("*step=4.ckpt"))
    with pytest.raises(CheckpointError) as caught:
        fit(folder, 5, ckpt_path=str(newest))
    return fit(folder, 5, ckpt_path="auto"), str(caught.value)


@pytest.fixture(scope="module", params=[ModelCheckpoint, AsyncCheckpoint])
def good(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    run_ranks(fit, 2, folder, 4, request.param)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_all_ranks_go_on_from_the_older_folder(good, name, tmp_path):
    folder = tmp_path / "files"
    shutil.copytree(good, folder)
    DAMAGES[name](folder)
    (first, told), (second, told_there) = run_ranks(on_two_ranks, 2, folder)
    assert first == second == 2
    assert told == told_there
    assert ("__0_0" if "rank 0" in name else "__1_0") in told


@pytest.mark.parametrize("name", DAMAGES)
def test_one_process_goes_on_from_the_older_folder(good, name, tmp_path):
    folder = tmp_path / "files"
    shutil.copytree(good, folder)
    DAMAGES[name](folder)
    with pytest.raises(CheckpointError, match="__0_0" if "rank 0" in name else "__1_0"):
        fit(folder, 5, strategy="auto", devices=1, ckpt_path=str(next(folder.glob("*step=4.ckpt"))))
    assert fit(folder, 5, strategy="auto", devices=1, ckpt_path="auto") == 2
