"""Modules, data and functions whose pickles ``92a6732.pickle`` holds: their names and attributes stay as they are."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricamp import DataModule, LightningDataModule, LightningModule, TrainingModule
from fabricamp.callbacks import BaseFinetuning, BasePredictionWriter
from fabricamp.nn import FusedLayerNorm, SyncBatchNorm
from fabricamp.optimizers import FusedAdam
from tests.small import data


class Small(TrainingModule):
    """A linear layer, Adam with a schedule; logs ``loss`` and ``val_loss``."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normed(Small):
    """With the normalizations of ``fabricamp.nn``."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 4), SyncBatchNorm(4), FusedLayerNorm(4), torch.nn.Linear(4, 3)
        )


class Hyper(Small):
    """Built from hyper-parameters."""

    def __init__(self, width=4, rates=(0.1, 0.2), **others):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 3))


class Named(LightningModule):
    """By Lightning's name."""

    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(8, 3)
        self.example_input_array = torch.zeros(1, 8)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Small):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        optimizer = first if batch_idx % 2 else second
        self.toggle_optimizer(optimizer)
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return FusedAdam(self.net[0].parameters(), lr=0.01), torch.optim.SGD(self.net[1].parameters(), lr=0.01)


class Thaws(BaseFinetuning):
    """Freezes the layer until the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Backboned(Small):
    """With a ``backbone``, for BackboneFinetuning."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self):
        return FusedAdam(self.net.parameters(), lr=0.01)


class Writes(BasePredictionWriter):
    """Keeps how many predictions it was given."""

    count = 0

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.count += len(prediction)


class Data(DataModule):
    """Built from hyper-parameters."""

    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(data(16), self.hparams.batch_size)


class NamedData(LightningDataModule):
    """By Lightning's name."""

    def train_dataloader(self):
        return DataLoader(data(16), 4)


class Squares(Dataset):
    """Squares, and a draw."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index * index, torch.rand(()).item()


class Stream(IterableDataset):
    """Ten numbers."""

    def __iter__(self):
        return iter(range(10))


def mean_of(averaged, own, count):
    """A running mean, for callbacks that average by a function of the user's."""
    return averaged + (own - averaged) / (count + 1)


def announce(trainer, pl_module):
    """A hook for LambdaCallback."""


def loaders():
    return DataLoader(data(16), 4), DataLoader(data(8), 4)
