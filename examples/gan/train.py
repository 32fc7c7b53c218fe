"""Trains a GAN on eight clusters in the plane.  It teaches one thing: manual optimization, with two optimizers in one step.

``python train.py`` counts how many of the clusters the generator learns.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Trainer, TrainingModule, seed_everything

NOISE = 8  # numbers that the generator turns into a point
SPREAD = 0.3  # standard deviation of a cluster; the centres are on a circle of radius 4


def centres() -> Tensor:
    angle = torch.arange(8) * torch.pi / 4
    return 4 * torch.stack([angle.cos(), angle.sin()], dim=1)


def real_points(count: int) -> Tensor:
    return centres()[torch.randint(8, (count,))] + SPREAD * torch.randn(count, 2)


def network(inputs: int, outputs: int, width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(TrainingModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # training_step calls backward and the optimizers itself
        self.generator = network(NOISE, 2)
        self.discriminator = network(2, 1)

    def sample(self, count: int) -> Tensor:
        points: Tensor = self.generator(torch.randn(count, NOISE, device=self.device))
        return points

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        # The discriminator learns to give real points scores above 0, and generated points scores below 0.
        fake = self.sample(len(real)).detach()  # detached: this loss does not train the generator
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.log("discriminator_loss", loss, prog_bar=True)

        # The generator learns to make points that get scores above 0.
        with self.toggled_optimizer(generator_optimizer):  # within, the discriminator's parameters get no gradients
            loss = F.softplus(-self.discriminator(self.sample(len(real)))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(loss)
            generator_optimizer.step()
        self.log("generator_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        lr = self.hparams.lr
        return [
            torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.9)),
        ]


def judge(points: Tensor) -> tuple[int, float]:
    """Returns the number of clusters that hold at least 2 % of the points, and the share of points in any cluster."""
    distance, cluster = torch.cdist(points, centres()).min(dim=1)
    inside = distance < 3 * SPREAD
    counts = cluster[inside].bincount(minlength=8)
    return int((counts >= 0.02 * len(points)).sum()), float(inside.float().mean())


def draw(path: str, clouds: dict[str, Tensor]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.9), layout="constrained")
    for axes, (title, points) in zip(figure.subplots(1, len(clouds)), clouds.items(), strict=True):
        axes.scatter(*points[:1000].T.numpy(), s=1.5, alpha=0.5)
        axes.set(title=title, xlim=(-6, 6), ylim=(-6, 6), xticks=[], yticks=[], aspect="equal")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument("--picture", metavar="PATH", help="draw real and generated points into this file")
    options = parser.parse_args()
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")

    seed_everything(0)
    real = real_points(25_600)  # 100 steps in an epoch
    loader = DataLoader(TensorDataset(real), batch_size=256, shuffle=True)
    module = GAN()
    with torch.no_grad():
        before = module.sample(4000)
    trainer = Trainer(max_epochs=2 if options.quick else 12, default_root_dir="runs/gan")
    trainer.fit(module, loader)
    with torch.no_grad():
        after = module.sample(4000).cpu()

    for name, points in {"before training": before, "after training": after, "real points": real}.items():
        clusters, inside = judge(points)
        print(f"{name}: {clusters} of 8 clusters, {inside:.1%} of the points in a cluster")
    if options.picture:
        draw(options.picture, {"real points": real, "before training": before, "after training": after})


if __name__ == "__main__":
    main()
