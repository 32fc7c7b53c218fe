"""Networks that several benchmarks share: ResNet-50, which torch itself does not come with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ResNet", "resnet50", "tiny_resnet"]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with its norm, around a shortcut; the stride is the middle one's."""

    def __init__(self, inside: int, width: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        outside = 4 * width
        self.first = nn.Conv2d(inside, width, 1, bias=False)
        self.first_norm = norm(width)
        self.second = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.second_norm = norm(width)
        self.third = nn.Conv2d(width, outside, 1, bias=False)
        self.third_norm = norm(outside)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inside, H, W) to (N, 4 width, H / stride, W / stride)."""
        hidden = F.relu(self.first_norm(self.first(x)), inplace=True)
        hidden = F.relu(self.second_norm(self.second(hidden)), inplace=True)
        hidden = self.third_norm(self.third(hidden))
        return F.relu(hidden + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """Four stages of bottleneck blocks over (N, 3, H, W) images; ``norm`` makes each normalisation from its channels."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.stem_norm = norm(width)
        layers, inside = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(inside, width << stage, stride, norm))
                inside = 4 * (width << stage)
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) to (N, classes)."""
        hidden = F.relu(self.stem_norm(self.stem(images)), inplace=True)
        hidden = self.stages(F.max_pool2d(hidden, 3, 2, padding=1))
        return self.head(hidden.mean((2, 3)))


def resnet50(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> ResNet:
    """ResNet-50: 25.6 million parameters in 161 tensors."""
    return ResNet(norm=norm)


def tiny_resnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> ResNet:
    """The same with one block a stage and 8 channels, to see on a CPU that a script works."""
    return ResNet((1, 1, 1, 1), width=8, classes=10, norm=norm)
