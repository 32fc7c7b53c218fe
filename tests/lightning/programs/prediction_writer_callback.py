"""BasePredictionWriter: files a batch and a file an epoch, with the samples' indices."""

import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader


class CustomWriter(BasePredictionWriter):
    def __init__(self, output_dir, write_interval):
        super().__init__(write_interval)
        self.output_dir = output_dir
        os.makedirs(output_dir, exist_ok=True)

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        print("batch", dataloader_idx, batch_idx, batch_indices, f"{prediction.sum():.6f}")
        torch.save(prediction, os.path.join(self.output_dir, f"{dataloader_idx}_{batch_idx}.pt"))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        print("epoch", len(predictions), batch_indices)
        torch.save(predictions, os.path.join(self.output_dir, "predictions.pt"))


class Doubler(pl.LightningModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return 2 * batch


data = torch.arange(10.0)
writer = CustomWriter(output_dir="predictions", write_interval="batch_and_epoch")
trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[writer], logger=False)
trainer.predict(Doubler(), DataLoader(data, batch_size=4), return_predictions=False)
print("files", sorted(os.listdir("predictions")))
