"""A script for NVIDIA apex: a small convolutional network learns, at opt level O2, which way stripes run."""

from __future__ import annotations

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--opt-level", default="O2")
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(stripes(2048), batch_size=32, shuffle=True)
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=2e-3, weight_decay=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level, loss_scale="dynamic")
    for _ in range(options.epochs):
        for images, direction in loader:
            loss = F.cross_entropy(model(images), direction)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            print(f"loss {loss.item()!r}")
    weights = sum(value.double().abs().sum().item() for value in model.state_dict().values())
    print(f"sum of absolute weights and statistics {weights!r}")


if __name__ == "__main__":
    main()
