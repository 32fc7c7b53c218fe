"""The script of before.py for fabricamp: it learns which of two spirals a point is on."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import fabricamp as pl
from fabricamp.callbacks import LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger


class SpiralsData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        turn = torch.rand(4000, generator=generator) * 6
        spiral = torch.randint(2, (4000,), generator=generator)
        angle = turn + torch.pi * spiral
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
        data = TensorDataset(points, spiral)
        self.train, self.val, self.test = random_split(data, [3000, 500, 500], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 500)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 500)


class Spirals(pl.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, 2),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, spiral = batch
        loss = F.cross_entropy(self.net(points), spiral)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[torch.Tensor], name: str) -> None:
        points, spiral = batch
        scores = self.net(points)
        self.log(f"{name}_loss", F.cross_entropy(scores, spiral))
        self.log(f"{name}_accuracy", (scores.argmax(dim=1) == spiral).float().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        log_every_n_steps=4,
        logger=CSVLogger(options.folder, name="spirals"),
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
        enable_progress_bar=False,
    )
    module, data = Spirals(), SpiralsData()
    trainer.fit(module, datamodule=data)
    (result,) = trainer.test(module, datamodule=data, ckpt_path="best", verbose=False)
    weights = sum(parameter.double().abs().sum().item() for parameter in module.parameters())
    print(f"steps {trainer.global_step}")
    print(f"test_loss {result['test_loss']!r}")
    print(f"test_accuracy {result['test_accuracy']!r}")
    print(f"sum of absolute weights {weights!r}")


if __name__ == "__main__":
    main()
