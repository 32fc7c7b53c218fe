"""Unit tests of a module: steps called without a trainer, hooks counted, limits, and a fast run."""

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset


class RandomDataset(Dataset):
    def __init__(self, size: int, length: int):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


class BoringModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def forward(self, x):
        return self.layer(x)

    def loss(self, preds, labels=None):
        labels = torch.ones_like(preds) if labels is None else labels
        return torch.nn.functional.mse_loss(preds, labels)

    def step(self, batch):
        return self.loss(self(batch))

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("val_loss", loss)
        return {"x": loss}

    def test_step(self, batch, batch_idx):
        return {"y": self.step(batch)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class HookCounter(Callback):
    def __init__(self):
        self.calls = []

    def on_train_start(self, trainer, pl_module):
        self.calls.append("train_start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.append(f"batch {batch_idx}")

    def on_before_backward(self, trainer, pl_module, loss):
        self.calls.append("backward")

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.calls.append("zero_grad")

    def on_validation_start(self, trainer, pl_module):
        self.calls.append("sanity" if trainer.sanity_checking else "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.calls.append("epoch_end")

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append(type(exception).__name__)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def test_training_step_without_a_trainer():
    model = BoringModel()
    batch = torch.ones(4, 32)
    loss = model.training_step(batch, 0)["loss"]
    loss.backward()
    assert model.layer.weight.grad is not None
    print("step", f"{loss.item():.8f}", model.current_epoch, model.global_step, model.device, model.logger)


def test_fast_dev_run():
    model, counter = BoringModel(), HookCounter()
    trainer = Trainer(fast_dev_run=True, callbacks=[counter], accelerator="cpu", enable_progress_bar=False)
    trainer.fit(model)
    trainer.test(model)
    print(
        "fast",
        trainer.global_step,
        trainer.max_steps,
        trainer.num_training_batches,
        trainer.num_val_batches,
        counter.calls,
    )
    model.logger.experiment.add_scalar("swallowed", 1.0)


def test_limits():
    model, counter = BoringModel(), HookCounter()
    limits = {"limit_train_batches": 0.05, "limit_val_batches": 2, "max_epochs": 2}
    trainer = Trainer(**QUIET, **limits, callbacks=[counter])
    trainer.fit(model)
    print(
        "limits", trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches, counter.calls
    )
    print("losses", f"{trainer.callback_metrics['train_loss']:.8f} {trainer.logged_metrics['val_loss']:.8f}")


def test_overfit_batches():
    model = BoringModel()
    trainer = Trainer(**QUIET, overfit_batches=2, max_epochs=5)
    trainer.fit(model, DataLoader(RandomDataset(32, 20), batch_size=4))
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    print("overfit", trainer.global_step, f"{trainer.callback_metrics['train_loss']:.8f}")


def test_hooks_by_mock():
    model = BoringModel()
    model.on_train_epoch_end = Mock()
    model.on_validation_epoch_end = Mock()
    trainer = Trainer(**QUIET, max_epochs=3, limit_train_batches=2, limit_val_batches=1, check_val_every_n_epoch=2)
    trainer.fit(model)
    print("mocks", model.on_train_epoch_end.call_count, model.on_validation_epoch_end.call_count)


def test_exceptions():
    with pytest.raises(MisconfigurationException):
        Trainer(**QUIET, limit_train_batches=1.5)
    counter = HookCounter()

    class Broken(BoringModel):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[counter])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken())
    print("broken", counter.calls, trainer.interrupted, trainer.state.status == "interrupted")


def test_datamodule_and_tensors():
    data = LightningDataModule.from_datasets(RandomDataset(32, 8), RandomDataset(32, 4), batch_size=2)
    model, trainer = BoringModel(), Trainer(**QUIET, max_steps=3)
    trainer.fit(model, datamodule=data)
    print(
        "data", trainer.global_step, trainer.max_epochs, len(trainer.train_dataloader), f"{model.layer.bias.sum():.8f}"
    )


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            seed_everything(9)
            test()
