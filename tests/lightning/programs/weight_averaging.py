"""Averages of the weights by Lightning's callbacks: exponential ones, and stochastic weight averaging."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(callback):
    pl.seed_everything(4)
    x = torch.randn(64, 6)
    model = Net()
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), batch_size=16, shuffle=True))
    weights = sum(p.double().sum() for p in model.parameters())
    print(type(callback).__name__, f"{trainer.callback_metrics['loss']:.8f}", f"{weights:.9f}")


fit(EMAWeightAveraging(decay=0.9))
fit(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2))
