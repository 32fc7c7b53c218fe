"""K-fold: a data module that is told its fold, a fit a fold, and the last trainer goes on for two epochs more."""

import statistics
from abc import ABC, abstractmethod

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanSquaredError


class BaseKFoldDataModule(pl.LightningDataModule, ABC):
    @abstractmethod
    def setup_folds(self, num_folds: int) -> None:
        pass

    @abstractmethod
    def setup_fold_index(self, fold_index: int) -> None:
        pass


class Housing(BaseKFoldDataModule):
    def __init__(self, number=90, batch_size=10):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        self.prepared = getattr(self, "prepared", 0) + 1

    def setup(self, stage=None):
        if not hasattr(self, "dataset"):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(self.hparams.number, 5, generator=generator)
            y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.1 * torch.randn(
                self.hparams.number, generator=generator
            )
            self.dataset = TensorDataset(x, y)
            self.train_fold = self.val_fold = None

    def setup_folds(self, num_folds):
        self.num_folds = num_folds
        self.parts = torch.randperm(self.hparams.number, generator=torch.Generator().manual_seed(1)).chunk(num_folds)

    def setup_fold_index(self, fold_index):
        rest = torch.cat([part for index, part in enumerate(self.parts) if index != fold_index])
        self.train_fold = Subset(self.dataset, rest.tolist())
        self.val_fold = Subset(self.dataset, self.parts[fold_index].tolist())

    def train_dataloader(self):
        return DataLoader(self.train_fold, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_fold, batch_size=self.hparams.batch_size)


class Regressor(pl.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(5, 1)
        self.error = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.layer(x).squeeze(1), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error(self.layer(x).squeeze(1), y)
        self.log("val_mse", self.error)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mse"}}


def run_fold(fold, data):
    data.setup_fold_index(fold)
    model = Regressor()
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)
    (result,) = trainer.validate(model, datamodule=data, verbose=False)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    print(
        "fold",
        fold,
        trainer.global_step,
        f"{trainer.callback_metrics['val_mse']:.8f} {result['val_mse']:.8f} {rate:.6f}",
    )
    return trainer, model, result["val_mse"]


if __name__ == "__main__":
    pl.seed_everything(100)
    data = Housing()
    data.setup()
    data.setup_folds(3)
    scores = []
    for fold in range(3):
        trainer, model, score = run_fold(fold, data)
        scores.append(score)
    print("mean", f"{statistics.mean(scores):.8f}", f"{statistics.stdev(scores):.8f}", data.prepared)

    trainer.fit(model, datamodule=data)
    print("at the limit", trainer.current_epoch, trainer.global_step)
    trainer.fit_loop.max_epochs += 2
    trainer.fit(model, datamodule=data)
    print("went on", trainer.current_epoch, trainer.global_step, trainer.max_epochs)
    print("weights", [f"{value:.8f}" for value in model.layer.weight.flatten().tolist()])
    print("losses", f"{trainer.callback_metrics['train_loss_epoch']:.8f} {trainer.callback_metrics['val_mse']:.8f}")
