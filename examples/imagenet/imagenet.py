"""ResNet-50, and two kinds of images for it: folders of files as in ImageNet, or synthetic ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabricamp import DataModule


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet(blocks: list[int], width: int, classes: int) -> nn.Sequential:
    """Returns ResNet-50 with ``blocks=[3, 4, 6, 3], width=64``."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, stride=2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in a folder per class, as uint8 tensors of (3, size, size); ``training`` crops and flips them at random."""

    def __init__(self, folder: Path, size: int, *, training: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())
        ]
        self.size = size
        self.training = training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = random_box(*image.size) if self.training else center_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if self.training and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns a box with 8 to 100 % of the area and a ratio of sides of 3:4 to 4:3."""
    area, ratio, x, y = torch.rand(4).tolist()
    area = (0.08 + 0.92 * area) * width * height
    ratio = (3 / 4) * (16 / 9) ** ratio
    w, h = min((area * ratio) ** 0.5, width), min((area / ratio) ** 0.5, height)
    left, top = x * (width - w), y * (height - h)
    return left, top, left + w, top + h


def center_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the square in the middle whose side is 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def synthetic(count: int, size: int, classes: int, seed: int) -> TensorDataset:
    """Returns noisy stripes, whose direction is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    angle = (labels * torch.pi / classes).view(-1, 1, 1, 1)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    phase = 6.28 * torch.rand(count, 3, 1, 1, generator=generator)
    images = torch.sin(0.6 * (x * angle.cos() + y * angle.sin()) + phase)
    noise = torch.randn(images.shape, generator=generator)
    return TensorDataset((128 + 30 * images + 40 * noise).clamp(0, 255).byte(), labels)


class Images(DataModule):
    """``data`` holds the folders train and val; None makes ``count`` synthetic images.  ``batch_size`` is that of a process."""

    def __init__(self, data: Path | None, size: int, batch_size: int, workers: int, count: int = 1024) -> None:
        super().__init__()
        self.train: ImageFolder | TensorDataset
        self.val: ImageFolder | TensorDataset
        if data is None:
            self.classes = 8
            self.train, self.val = (synthetic(n, size, self.classes, seed) for n, seed in ((count, 0), (256, 1)))
        else:
            self.train, self.val = (
                ImageFolder(data / name, size, training=name == "train") for name in ("train", "val")
            )
            self.classes = len(self.train.classes)
        self.options = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": workers > 0}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.train, shuffle=True, drop_last=True, pin_memory=torch.cuda.is_available(), **self.options
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, pin_memory=torch.cuda.is_available(), **self.options)
