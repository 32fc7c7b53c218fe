"""The script of before.py with the Trainer: amp's lines are one argument, and ranks, logs, checkpoints and resume come with it."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import OptLevel, Trainer, TrainingModule
from fabricamp.loggers import CSVLogger
from fabricamp.optimizers import FusedAdam


def stripes(count: int) -> TensorDataset:
    """Returns noisy images of 12 x 12 pixels with stripes in four directions, and the directions."""
    direction = torch.randint(4, (count,))
    angle = (direction * torch.pi / 4).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = torch.rand(count, 1, 1) * 6.28
    images = torch.sin(x * angle.cos() * 1.5 + y * angle.sin() * 1.5 + phase) + torch.randn(count, 12, 12)
    return TensorDataset(images.unsqueeze(1), direction)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 4),
    )


class Stripes(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, direction = batch
        loss = F.cross_entropy(self.model(images), direction)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> FusedAdam:
        return FusedAdam(self.parameters(), lr=2e-3, weight_decay=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(stripes(2048), batch_size=32, shuffle=True)
    module = Stripes()
    trainer = Trainer(
        devices=1,
        max_epochs=options.epochs,
        precision=OptLevel(options.opt_level, loss_scale="dynamic"),
        log_every_n_steps=1,
        logger=CSVLogger(options.folder, name="stripes"),
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    weights = sum(value.double().abs().sum().item() for value in module.state_dict().values())
    print(f"sum of absolute weights and statistics {weights!r}")


if __name__ == "__main__":
    main()
