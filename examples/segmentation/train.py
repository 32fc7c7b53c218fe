"""Segments shapes with a small U-Net.  It teaches one thing: a loss over labelled pixels only, as a sum with its weight.

``python train.py`` trains on masks of which a different share is labelled in each image, and reports the IoU of each class.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Trainer, TrainingModule, seed_everything

SIZE = 48  # pixels
CLASSES = ("background", "disc", "square", "ring")
UNLABELLED = 255  # pixels of this class take no part in the loss


def shapes(count: int) -> tuple[Tensor, Tensor]:
    """Returns noisy images of one disc, square and ring each, which may cover each other, and the class of each pixel."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    masks = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    images = torch.zeros(count, SIZE, SIZE)
    for kind in range(1, 4):
        centre_x, centre_y = torch.randint(8, SIZE - 8, (2, count, 1, 1))
        radius = torch.randint(6, 11, (count, 1, 1))
        distance = ((x - centre_x).square() + (y - centre_y).square()).sqrt()
        if kind == 2:
            distance = torch.maximum((x - centre_x).abs(), (y - centre_y).abs())
        inside = distance <= radius
        if kind == 3:
            inside &= distance >= radius / 2
        masks[inside] = kind
        images = torch.where(inside, 0.4 + 0.6 * torch.rand(count, 1, 1), images)  # grey says nothing about the class
    return (images + 0.15 * torch.randn_like(images)).unsqueeze(1), masks


def partly_labelled(masks: Tensor) -> Tensor:
    """Returns masks in which each image keeps the labels of 1 to 20 % of its pixels, as from an annotator in a hurry."""
    share = 0.01 + 0.19 * torch.rand(len(masks), 1, 1)
    return masks.where(torch.rand(masks.shape) < share, UNLABELLED)


def convolutions(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Halves the image twice and doubles it twice; the way up also reads what the way down computed at the same size."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down1, self.down2 = convolutions(1, width), convolutions(width, 2 * width)
        self.bottom = convolutions(2 * width, 4 * width)
        self.up2, self.up1 = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.bottom(F.max_pool2d(second, 2))
        second = self.up2(torch.cat([second, F.interpolate(third, scale_factor=2)], dim=1))
        first = self.up1(torch.cat([first, F.interpolate(second, scale_factor=2)], dim=1))
        scores: Tensor = self.head(first)
        return scores


class Segmenter(TrainingModule):
    def __init__(self, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        images, masks = batch
        total = F.cross_entropy(self.net(images), masks, ignore_index=UNLABELLED, reduction="sum")
        weight = (masks != UNLABELLED).sum()
        self.log("train_loss", total / weight, prog_bar=True)
        # A sum and its weight: the Trainer divides the sum of a step's batches by the number of labelled pixels in all of them.
        return total, weight

    def on_validation_epoch_start(self) -> None:
        self.pairs = torch.zeros(len(CLASSES) ** 2, device=self.device)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, masks = batch
        pairs = len(CLASSES) * masks + self.net(images).argmax(dim=1)  # one number per (true class, predicted class)
        self.pairs += pairs.flatten().bincount(minlength=len(self.pairs))

    def on_validation_epoch_end(self) -> None:
        pairs = self.pairs.view(len(CLASSES), len(CLASSES))
        iou = pairs.diag() / (pairs.sum(0) + pairs.sum(1) - pairs.diag())  # intersection over union
        self.log_dict({f"iou_{name}": value for name, value in zip(CLASSES, iou, strict=True)})
        self.log("iou", iou.mean(), prog_bar=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        classes: Tensor = self.net(batch[0]).argmax(dim=1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def draw(path: str, rows: dict[str, Tensor]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5.1), layout="constrained")
    for line, (title, images) in zip(figure.subplots(len(rows), 4), rows.items(), strict=True):
        line[0].set_ylabel(title)
        for axes, image in zip(line, images, strict=False):
            known = image.float().where(image != UNLABELLED, torch.nan)  # nan is drawn white
            if image.is_floating_point():
                axes.imshow(image.numpy(), cmap="gray")
            else:
                axes.imshow(known.numpy(), cmap="viridis", vmin=0, vmax=3)
            axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=52)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument("--picture", metavar="PATH", help="draw images and masks into this file")
    options = parser.parse_args()
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")

    seed_everything(0)
    images, masks = shapes(96 if options.quick else 800)
    labels = partly_labelled(masks)
    test = TensorDataset(*shapes(50))
    train_loader = DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)
    test_loader = DataLoader(test, batch_size=50)
    module = Segmenter()
    trainer = Trainer(
        max_epochs=2 if options.quick else 7, accumulate_grad_batches=2, default_root_dir="runs/segmentation"
    )
    (before,) = trainer.validate(module, test_loader, verbose=False)
    trainer.fit(module, train_loader)
    (after,) = trainer.validate(module, test_loader, verbose=False)

    print(f"labelled pixels in training: {(labels != UNLABELLED).float().mean():.1%}")
    print(f"mean IoU before training: {before['iou']:.3f}")
    print(f"mean IoU after training: {after['iou']:.3f}")
    print("of each class:", ", ".join(f"{name} {after[f'iou_{name}']:.3f}" for name in CLASSES))
    if options.picture:
        predicted = torch.cat(trainer.predict(module, test_loader) or [])
        rows = {"image": test.tensors[0][:, 0], "true mask": test.tensors[1], "predicted": predicted}
        draw(options.picture, {"training labels": labels, **rows})


if __name__ == "__main__":
    main()
