"""Optimizers whose states are tensors of classes of their own, on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.trainer.test_optimizer_states import Net, batches


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
