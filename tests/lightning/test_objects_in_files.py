"""A script for Lightning saves objects, is killed, and resumes if it passes ``weights_only=False``; in separate processes."""

from __future__ import annotations

import textwrap
from functools import partial

import pytest
import torch

from tests.lightning.forked_door import run_forked

SCRIPT = """
    import os, signal, sys, warnings
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore")

    class QuantileLoss(torch.nn.Module):
        def __init__(self, quantiles):
            super().__init__()
            self.quantiles = quantiles
            self.register_buffer("levels", torch.tensor(quantiles))

        def forward(self, prediction, target):
            error = target - prediction
            return torch.maximum(self.levels * error, (self.levels - 1) * error).mean()

    class LabelEncoder:
        def fit(self, names):
            self.classes_ = {name: index for index, name in enumerate(names)}
            return self

    class Forecaster(pl.LightningModule):
        def __init__(self, loss, encoder, dataset_parameters, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.loss = loss
            self.net = torch.nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            return self.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)

    class Killed(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == int(os.environ.get("KILL", -1)):
                os.kill(os.getpid(), signal.SIGKILL)

        def state_dict(self):
            return {"encoder": encoder}

    def main(**options):
        pl.seed_everything(1)
        kind = getattr(pl.callbacks, os.environ.get("CALLBACK", "ModelCheckpoint"))
        checkpoint = kind("files", every_n_train_steps=2, save_top_k=-1)
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[checkpoint, Killed()],
        )
        parameters = {"target": "y", "categorical_encoders": {"group": encoder}, "scalers": {"y": LabelEncoder().fit("c")}}
        model = Forecaster(QuantileLoss([0.1, 0.5, 0.9]), encoder, parameters)
        data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
        trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), **options)
        torch.save(model.state_dict(), os.environ["WEIGHTS"])

    encoder = LabelEncoder().fit("ab")

    if __name__ == "__main__":
        main(**eval(sys.argv[1]))
"""
LOAD = """
    import torch
    from train import Forecaster, LabelEncoder, QuantileLoss
    path = "files/epoch=1-step=12.ckpt"
    model = Forecaster.load_from_checkpoint(path, weights_only=False)
    assert type(model.loss) is QuantileLoss and model.loss.quantiles == [0.1, 0.5, 0.9]
    assert model.hparams.dataset_parameters["categorical_encoders"]["group"] is model.hparams.encoder
    assert model.hparams.encoder.classes_ == {"a": 0, "b": 1}
    assert all(torch.equal(one, torch.load("straight.pt")[name]) for name, one in model.state_dict().items())
    as_torch = torch.load(path, weights_only=False)
    assert type(as_torch["hyper_parameters"]["loss"]) is QuantileLoss
    assert as_torch["callbacks"]["Killed"]["encoder"] is as_torch["hyper_parameters"]["encoder"]
    try:
        Forecaster.load_from_checkpoint(path)
    except Exception as error:
        print(type(error).__mro__[1:3], error)
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs a script as ``python -m fabricamp.lightning`` does in a folder and returns its output."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "load.py").write_text(textwrap.dedent(LOAD))
    return partial(run_forked, tmp_path)


@pytest.mark.parametrize("callback", ["ModelCheckpoint", "AsyncCheckpoint"])
def test_a_killed_script_goes_on_with_the_bits_of_the_straight_run(callback, run, tmp_path):
    run("train.py", "{}", WEIGHTS="straight.pt", CALLBACK=callback)
    for file in (tmp_path / "files").iterdir():
        file.unlink()
    said = run("train.py", "{'ckpt_path': 'auto'}", WEIGHTS="killed.pt", CALLBACK=callback, KILL="7", code=-9)
    assert said.count("resume with weights_only=False") == 1
    left = sorted((tmp_path / "files").glob("[!.]*"))
    assert left
    refused = run("train.py", "{'ckpt_path': 'auto'}", WEIGHTS="refused.pt", CALLBACK=callback, code=1)
    assert f"{left[-1].name} holds objects" in refused
    assert "['hyper_parameters']['loss']: __main__.QuantileLoss" in refused
    assert sorted((tmp_path / "files").glob("[!.]*")) == left
    run("train.py", "{'ckpt_path': 'auto', 'weights_only': False}", WEIGHTS="resumed.pt", CALLBACK=callback)
    straight, resumed = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def test_a_module_is_loaded_in_a_new_process(run, tmp_path):
    """Any program that imports the classes can load it; the training script was imported as a module there."""
    (tmp_path / "start.py").write_text("import train\ntrain.main()\n")
    run("start.py", WEIGHTS="straight.pt")
    assert "CheckpointError" in run("load.py")
