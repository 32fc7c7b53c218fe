"""The Tuner: a batch size and a learning rate are looked for before the fit."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self, learning_rate=1e-5, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def train_dataloader(self):
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=self.hparams.batch_size, shuffle=True)


pl.seed_everything(1)
model = Regression()
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
tuner = Tuner(trainer)
size = tuner.scale_batch_size(model, mode="power", steps_per_trial=2, max_trials=3)
print("batch size", size, model.hparams.batch_size)
pl.seed_everything(1)  # that search leaves random numbers where its trials came to

finder = tuner.lr_find(model, min_lr=1e-5, max_lr=1.0, num_training=40)
print("tried", len(finder.results["lr"]), f"{finder.results['lr'][0]:.8f} {finder.results['lr'][-1]:.8f}")
print("losses", [f"{loss:.8f}" for loss in finder.results["loss"][:3]])
print("suggestion", f"{finder.suggestion():.8f}", f"{model.hparams.learning_rate:.8f}")

trainer.fit(model)
print("trained", trainer.global_step, f"{trainer.callback_metrics['train_loss']:.8f}")
