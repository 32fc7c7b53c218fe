"""Weights & Biases without a server, an exponential average of the weights, and stochastic weight averaging after it."""

import pytorch_lightning as pl
import torch
import wandb
from pytorch_lightning.callbacks import EMAWeightAveraging, LearningRateMonitor, StochasticWeightAveraging
from pytorch_lightning.loggers import WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, width=12, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x).squeeze(1), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def data(number, seed):
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, 0] * x[:, 1])


def fit(name, logger, *callbacks):
    pl.seed_everything(6)
    model = Net()
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", callbacks=[*callbacks], logger=logger, log_every_n_steps=2
    )
    trainer.fit(model, DataLoader(data(64, 0), batch_size=16, shuffle=True), DataLoader(data(32, 1), batch_size=16))
    metrics = trainer.callback_metrics
    print(name, trainer.global_step, f"{metrics['loss']:.8f} {metrics['val_loss']:.8f}")
    print("average", name, f"{sum(p.double().sum() for p in model.parameters()):.9f}")


if __name__ == "__main__":
    logger = WandbLogger(project="averages", name="ema", id="averaged", offline=True, save_dir=".", tags=["small"])
    rates = LearningRateMonitor(logging_interval="step")
    fit("ema", logger, EMAWeightAveraging(decay=0.8, update_starting_at_step=2), rates)
    print("run", logger.version, logger.experiment.id, logger.experiment.tags)
    print("config", dict(logger.experiment.config))
    summary = logger.experiment.summary
    print("summary", *(f"{name} {summary[name]:.8f}" for name in ("loss", "val_loss", "lr-SGD")))
    print("axis", summary["epoch"], summary["trainer/global_step"])
    wandb.finish()
    fit("swa", False, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1))
