"""A profiler counts what the loop does."""

from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        with self.trainer.profiler.profile("squares"):
            loss = self.layer(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


pl.seed_everything(2)
loader = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=8)
profiler = SimpleProfiler(dirpath="profiles", filename="report")
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    profiler=profiler,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Net(), loader)
print("squares", len(profiler.recorded_durations["squares"]), f"{trainer.callback_metrics['loss']:.8f}")
print("epochs", len(profiler.recorded_durations["run_training_epoch"]))
print("batches", len(profiler.recorded_durations["run_training_batch"]))
print("reports", [path.name for path in Path("profiles").iterdir()])

trainer = pl.Trainer(max_epochs=1, profiler="simple", accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Net(), loader)
print("by name", type(trainer.profiler).__name__, len(trainer.profiler.recorded_durations["squares"]))
