"""Objects with tensors on a GPU are copied like the weights, also in the background, and load on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from tests.checkpoint.test_checkpoint_objects import Encoder, Forecast, Loss, Marked
from tests.small import loader, quiet_trainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("callback", [ModelCheckpoint, AsyncCheckpoint])
def test_a_loss_on_the_gpu_is_saved_as_it_was_at_its_step(callback, tmp_path):
    module = Forecast(Loss(), Encoder([torch.arange(4, device="cuda"), Marked(torch.ones(2, device="cuda"))]))
    checkpoint = callback(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        accelerator="gpu", max_steps=3, enable_checkpointing=True, callbacks=[checkpoint], checkpoint_objects=True
    )
    trainer.fit(module, loader())
    assert module.loss.seen.device.type == "cuda"
    for step in (1, 2, 3):
        content = read_checkpoint(tmp_path / f"epoch=0-step={step}.ckpt", weights_only=False)
        loss = content["hyper_parameters"]["loss"]
        assert loss.seen.device.type == "cpu"
        assert loss.seen.item() == step
        assert torch.equal(loss.weight, content["state_dict"]["loss.weight"])
        plain, marked = content["hyper_parameters"]["encoder"].classes
        assert plain.tolist() == [0, 1, 2, 3]
        assert (type(marked), marked.device.type, marked.tolist()) == (Marked, "cpu", [1, 1])
