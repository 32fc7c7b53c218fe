"""Small modules, data and a quiet Trainer, shared by the tests."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Trainer, TrainingModule

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**options):
    """Returns a Trainer on one CPU process without bar, summary, logger and checkpoints, updated by ``options``."""
    return Trainer(**{**QUIET, **options})


def data(num_samples=32, *, features=8, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, features, generator=generator)
    y = torch.randint(0, classes, (num_samples,), generator=generator)
    return TensorDataset(x, y)


def loader(num_samples=32, batch_size=4, *, shuffle=False, **options):
    return DataLoader(data(num_samples, **options), batch_size=batch_size, shuffle=shuffle)


class Classifier(TrainingModule):
    """Two layers, cross-entropy, SGD; logs ``loss``, ``val_loss`` and ``test_loss``."""

    def __init__(self, lr=0.1, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.net(x), y))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
