"""Optimizers whose states are tensors of classes of their own, on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.trainer.quantised import Codes
from tests.trainer.test_optimizer_states import Net, WithState, batches


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ended(folder, callback):
    """Returns whether a run of six steps and one resumed after three end equal."""
    ends = []
    for resumed in (False, True):
        options = {"devices": 2, "strategy": "ddp"}
        path = {}
        if resumed:
            checkpoint = callback(dirpath=folder, every_n_train_steps=3)
            quiet_trainer(max_steps=3, enable_checkpointing=True, callbacks=[checkpoint], **options).fit(
                Net(), batches()
            )
            path = {"ckpt_path": checkpoint.best_model_path}
        module = Net()
        quiet_trainer(max_steps=6, **options).fit(module, batches(), **path)
        ends.append([local(one.detach()).clone() for one in module.parameters()])
    return all(map(torch.equal, *ends))


@pytest.mark.parametrize("callback", [ModelCheckpoint, AsyncCheckpoint])
def test_a_run_of_two_ranks_goes_on_bit_for_bit(callback, tmp_path):
    assert run_ranks(ended, 2, tmp_path, callback) == [True, True]


def shards_of_codes(parameters):
    def made(one):
        return DTensor.from_local(Codes.of(one.to_local()), one.device_mesh, one.placements, run_check=False)

    return WithState(parameters, lambda one: made(one.detach()))


def refused(folder):
    module = Net(shards_of_codes)
    checkpoint = ModelCheckpoint(dirpath=folder)
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="fsdp", enable_checkpointing=True, callbacks=[checkpoint])
    with pytest.raises(CheckpointError, match=r"shards of class .*Codes.*'kept'.*strategy=\"ddp\""):
        trainer.fit(module, batches())
    return module.steps


def test_shards_of_such_a_class_are_told_after_the_first_step(tmp_path):
    assert run_ranks(refused, 2, tmp_path) == [1, 1]
