"""Two processes by DDPStrategy, with a branch of the model that some batches leave out."""

import datetime
import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Branches(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())
        self.odd = nn.Linear(12, 1)
        self.even = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        branch = self.odd if batch_idx % 2 else self.even
        loss = nn.functional.mse_loss(branch(self.trunk(x)).squeeze(1), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.even(self.trunk(x)).squeeze(1), y)
        self.log("val_loss", loss, sync_dist=True)

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        self.show("epoch", self.current_epoch, *(f"{name} {metrics[name]:.8f}" for name in sorted(metrics)))

    def on_train_end(self):
        weights = torch.stack([p.double().sum() for p in self.parameters()]).sum()
        gathered = self.all_gather(weights)
        self.show("equal weights", bool((gathered == gathered[0]).all()), tuple(gathered.shape))
        self.show("weights", f"{weights:.12f}")
        self.show(
            "world",
            self.trainer.world_size,
            self.trainer.num_devices,
            self.trainer.is_global_zero,
            type(self.trainer.strategy).__name__,
        )
        self.show("sampler", type(self.trainer.train_dataloader.sampler).__name__, self.trainer.num_training_batches)
        self.show("root device", self.trainer.strategy.root_device, self.trainer.local_rank, self.trainer.node_rank)

    @rank_zero_only
    def show(self, *values):
        print(*values, flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    pl.seed_everything(17)
    x = torch.randn(75, 6)
    train, val = TensorDataset(x[:55], x[:55].prod(dim=1)), TensorDataset(x[55:], x[55:].prod(dim=1))
    strategy = DDPStrategy(
        find_unused_parameters=True, process_group_backend="gloo", timeout=datetime.timedelta(seconds=60)
    )
    checkpoint = ModelCheckpoint(dirpath="saved", monitor="val_loss", save_top_k=1, filename="{epoch}-{val_loss:.5f}")
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        sync_batchnorm=False,
        log_every_n_steps=1,
    )
    model = Branches()
    trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=5))
    if trainer.is_global_zero:
        print("saved", os.path.basename(checkpoint.best_model_path), f"{checkpoint.best_model_score:.8f}", flush=True)
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
