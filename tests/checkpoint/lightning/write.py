"""Writes the files in this folder; needs a Python with Lightning: ``python tests/checkpoint/lightning/write.py``."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    """Saves its arguments, an additional entry, and a nested one."""

    def __init__(self, lr=0.5, **kwargs):
        super().__init__()
        if type(self) is Net:
            self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Whole(Net):
    """Takes all hyper-parameters as one argument."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)


def loader():
    return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 8), batch_size=2)


if __name__ == "__main__":
    files = {"spread": Net(lr=0.1, width=3, inner={"a": [1, 2]}), "whole": Whole({"lr": 0.1, "inner": {"a": [1, 2]}})}
    for name, module in files.items():
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            callbacks=EarlyStopping("val_loss"),
        )
        trainer.fit(module, loader(), loader())
        trainer.save_checkpoint(Path(__file__).with_name(f"{name}.ckpt"))
