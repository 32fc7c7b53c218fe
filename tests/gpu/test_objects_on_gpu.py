"""Objects with tensors on a GPU are copied like the weights, also in the background, and load on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.checkpoint.packing import pack_objects
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
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        # torch alone finds the same, and on the host too: no program that opens the file needs a GPU.
        for content in (read_checkpoint(path, weights_only=False), torch.load(path, weights_only=False)):
            loss = content["hyper_parameters"]["loss"]
            assert loss.seen.device.type == "cpu"
            assert loss.seen.item() == step
            assert torch.equal(loss.weight, content["state_dict"]["loss.weight"])
            plain, marked = content["hyper_parameters"]["encoder"].classes
            assert plain.tolist() == [0, 1, 2, 3]
            assert (type(marked), marked.device.type, marked.tolist()) == (Marked, "cpu", [1, 1])


def test_a_file_with_objects_is_mapped_to_a_gpu(tmp_path):
    state = {"state_dict": {}, "x": Encoder([torch.arange(3, device="cuda"), Marked(torch.ones(2, device="cuda"))])}
    write_checkpoint(tmp_path / "a.ckpt", pack_objects(state))
    loaded = read_checkpoint(tmp_path / "a.ckpt", "cuda", weights_only=False)
    for content in (loaded, torch.load(tmp_path / "a.ckpt", map_location="cuda", weights_only=False)):
        plain, marked = content["x"].classes
        assert (plain.device.type, plain.tolist()) == ("cuda", [0, 1, 2])
        assert (type(marked), marked.device.type, marked.tolist()) == (Marked, "cuda", [1, 1])
