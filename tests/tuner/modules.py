"""A module that keeps its learning rate and batch size, makes its loader, and changes much of its state in a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from fabricamp import TrainingModule
from tests.small import data


class Tried(TrainingModule):
    """A batch of more than ``limit`` samples raises CUDA's out-of-memory error."""

    def __init__(self, lr=0.1, batch_size=4, limit=10**9):
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
            )
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.mean_loss = MeanMetric()
        self.sizes = []
        self.counts = {"steps": 0}
        self.generator = torch.Generator().manual_seed(5)
        self.frozen = [self.net[0].bias]
        self.net[4].bias.requires_grad_(False)

    def _compute(self, batch):
        x, y = batch
        if len(x) > self.hparams.limit:
            raise torch.OutOfMemoryError(f"tried to allocate a batch of {len(x)}")
        self.sizes.append(len(x))
        return F.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch, batch_idx):
        loss = self._compute(batch)
        self.seen += 1
        self.counts["steps"] += 1
        self.note = f"step {batch_idx}"
        self.mean_loss.update(loss.detach())
        return loss

    def on_train_epoch_start(self):
        self.frozen[0].requires_grad_(False)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._compute(batch))

    def test_step(self, batch, batch_idx):
        self._compute(batch)

    def predict_step(self, batch, batch_idx):
        return self._compute(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(
            [one for one in self.parameters() if one.requires_grad], lr=self.hparams.lr, momentum=0.9
        )

    def _loader(self):
        return DataLoader(data(64), self.hparams.batch_size, shuffle=True, generator=self.generator)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def content(module):
    """Returns everything that a step changes, as values that can be compared."""
    tensors = {**module.state_dict(keep_vars=True), "seen": module.seen, "mean": module.mean_loss.mean_value}
    return {
        "tensors": {name: (one.tolist(), one.requires_grad, one.dtype, one.grad) for name, one in tensors.items()},
        "modes": [one.training for one in module.modules()],
        "plain": (dict(module.counts), hasattr(module, "note"), module.mean_loss.update_count, dict(module.hparams)),
        "generator": module.generator.get_state().tolist(),
        "identities": [id(one) for one in (*module.parameters(), module.sizes, module.counts, module.seen)],
    }
