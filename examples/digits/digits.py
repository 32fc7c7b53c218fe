"""A small convolutional network for scikit-learn's handwritten digits, and the digits themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import ConfigError, DataModule, TrainingModule
from fabricamp.errors import nearest
from fabricamp.optimizers import FusedAdam

RATES = {"torch": 0.2, "fused": 0.02}
"""The highest learning rate of the schedule, by optimizer."""


class DigitsClassifier(TrainingModule):
    """Two convolutions and two linear layers, with batch normalisation; 14 thousand parameters.

    ``optimizer`` is "torch" (SGD with momentum) or "fused" (FusedAdam); ``lr`` None is its rate in ``RATES``.
    """

    def __init__(
        self, lr: float | None = None, width: int = 16, dropout: float = 0.3, optimizer: str = "torch"
    ) -> None:
        super().__init__()
        if optimizer not in RATES:
            raise ConfigError(f"optimizer={optimizer!r} is not known{nearest(optimizer, RATES)} (known: torch, fused)")
        lr = RATES[optimizer] if lr is None else lr
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * width, 64, bias=False),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self(images), digits, label_smoothing=0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> dict[str, Any]:
        lr = self.hparams.lr
        if self.hparams.optimizer == "fused":
            optimizer = FusedAdam(self.parameters(), lr=lr, weight_decay=0.01)
        else:
            optimizer = torch.optim.SGD(
                self.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
            )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, batch: list[Tensor], name: str) -> None:
        images, digits = batch
        scores = self(images)
        correct = (scores.argmax(dim=1) == digits).float().mean()
        self.log(f"{name}_loss", F.cross_entropy(scores, digits), prog_bar=True, batch_size=len(digits))
        self.log(f"{name}_accuracy", correct, prog_bar=True, batch_size=len(digits))


class DigitsData(DataModule):
    """1797 scans of 8 x 8 pixels: 1347 to train on, 90 to validate, 360 to test, with equal shares of each digit.

    ``batch_size`` is that of all processes together, so that a run learns the same on one and on several.
    """

    def __init__(self, batch_size: int = 64, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, digits = load_digits(return_X_y=True)
        indices = range(len(digits))
        rest, test = train_test_split(indices, test_size=360, stratify=digits, random_state=self.split_seed)
        train, val = train_test_split(rest, test_size=90, stratify=digits[rest], random_state=self.split_seed)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        labels = torch.tensor(digits)
        self.train, self.val, self.test = (TensorDataset(pixels[part], labels[part]) for part in (train, val, test))

    def train_dataloader(self) -> DataLoader:
        processes = self.trainer.world_size
        if self.batch_size % processes:
            raise ConfigError(
                f"batch_size={self.batch_size} cannot be shared by {processes} processes; give a multiple"
            )
        return DataLoader(self.train, batch_size=self.batch_size // processes, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=128)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=128)

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()
