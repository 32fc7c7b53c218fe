"""Folders of sharded runs hold objects by the same rules as files: rank 0 pickles them into ``state.pt``."""

from __future__ import annotations

import pytest
import torch

from fabricamp import CheckpointError
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.errors import CheckpointObjectsError
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Table:
    def __init__(self, values):
        self.values = values


class Kept(Classifier):
    def __init__(self, table=None):
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["table"] = self.hparams.table

    def on_load_checkpoint(self, checkpoint):
        self.found = checkpoint["table"], checkpoint["hyper_parameters"]["table"]


class HoldsShards(Kept):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["table"] = Table([*self.net.parameters()])


def trainer(folder, kind=ModelCheckpoint, steps=2):
    return quiet_trainer(
        strategy="fsdp", devices=2, max_steps=steps, enable_checkpointing=True, checkpoint_objects=True,
        callbacks=[kind(dirpath=folder, every_n_train_steps=2)],
    )  # fmt: skip


def on_two_ranks(folder):
    for kind in (ModelCheckpoint, AsyncCheckpoint):
        where = folder / kind.__name__
        trainer(where, kind).fit(Kept(Table(torch.arange(3))), loader())
        with pytest.raises(CheckpointObjectsError, match=r"\['table'\]"):
            trainer(where, kind, 4).fit(Kept(), loader(), ckpt_path="auto")
        module = Kept()
        resumed = trainer(where, kind, 4)
        resumed.fit(module, loader(), ckpt_path="auto", weights_only=False)
        one, other = module.found
        assert one is other
        assert one.values.tolist() == [0, 1, 2]
        assert resumed.global_step == 4
    with pytest.raises(CheckpointError, match=r"\['table'\].*sharded tensor"):
        trainer(folder / "sharded").fit(HoldsShards(), loader())
    return True


def test_folders_of_two_ranks(tmp_path):
    assert run_ranks(on_two_ranks, 2, tmp_path) == [True, True]
    folder = next((tmp_path / "ModelCheckpoint").glob("*step=2*"))
    with pytest.raises(CheckpointObjectsError):
        Kept.load_from_checkpoint(folder)
    module = Kept.load_from_checkpoint(folder, weights_only=False)
    assert module.hparams.table.values.tolist() == [0, 1, 2]
    assert not [*(tmp_path / "sharded").glob("[!.]*")]
