"""Trains a GAN on eight clusters in the plane in a loop of its own: each of two optimizers makes a step of its own loss."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fabricamp

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


def clusters(points: Tensor) -> tuple[int, float]:
    """Returns the number of clusters that hold at least 2 % of the points, and the share of points in any cluster."""
    distance, cluster = torch.cdist(points, centres()).min(dim=1)
    inside = distance < 3 * SPREAD
    counts = cluster[inside].bincount(minlength=8)
    return int((counts >= 0.02 * len(points)).sum()), float(inside.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument("--precision", default="O0")
    parser.add_argument("--folder", default="runs/own_loop/gan")
    options = parser.parse_args()

    run = fabricamp.Loop(precision=options.precision, devices=1, default_root_dir=options.folder, seed=0)
    generator, critic = network(NOISE, 2), network(2, 1)
    of_generator, of_critic = (
        torch.optim.Adam(one.parameters(), lr=1e-3, betas=(0.5, 0.9)) for one in (generator, critic)
    )
    generator, critic, of_generator, of_critic = run.prepare(generator, critic, of_generator, of_critic)
    points = TensorDataset(real_points(25_600))
    loader = run.prepare_data(DataLoader(points, batch_size=256, shuffle=True))

    def fake(count: int) -> Tensor:
        points: Tensor = generator(torch.randn(count, NOISE, device=run.device))
        return points

    def critic_loss(batch: list[Tensor]) -> Tensor:
        (real,) = batch
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake(len(real)).detach())).mean()

    def generator_loss(batch: list[Tensor]) -> Tensor:
        return F.softplus(-critic(fake(len(batch[0])))).mean()

    run.restore("last")
    while run.epoch < (2 if options.quick else 12):
        for batch in loader:
            first = run.step(critic_loss, batch, of_critic)
            second = run.step(generator_loss, batch, of_generator)
        run.print(f"epoch {run.epoch}: critic {float(first):.2f}, generator {float(second):.2f}")
        run.save("last")

    with torch.no_grad():
        after = run.forward(fake, 4000).float().cpu()
    for name, cloud in {"generated points": after, "real points": real_points(4000)}.items():
        found, inside = clusters(cloud)
        run.print(f"{name}: {found} of 8 clusters, {inside:.1%} of the points in a cluster")
    run.close()


if __name__ == "__main__":
    main()
