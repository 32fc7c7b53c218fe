"""Balances a pole by policy gradients, and teaches one thing: a data set that makes its batches with the model in training."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from fabricamp import Trainer, TrainingModule, seed_everything
from fabricamp.loggers import CSVLogger

Batch = tuple[Tensor, Tensor, Tensor]
LONGEST = 200  # steps after which an episode ends with success


class CartPoles:
    """Carts with a pole each, all pushed at once; the equations of Barto, Sutton and Anderson (1983)."""

    def __init__(self, count: int) -> None:
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)  # position, speed, angle, angular speed
        self.upright = torch.ones(count, dtype=torch.bool)

    def push(self, right: Tensor) -> Tensor:
        """Pushes each cart to the right (1) or the left (0) for 20 ms; returns the reward: 1 where the pole was upright."""
        _, speed, angle, turning = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        force = (20.0 * right - 10.0 + 0.05 * turning**2 * sin) / 1.1
        angular = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = force - 0.05 * angular * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, linear, turning, angular], dim=1)
        reward = self.upright.float()
        self.upright = self.upright & (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)
        return reward


class Policy(TrainingModule):
    """Two layers that score the two pushes; REINFORCE with the mean over the carts as its baseline."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        states, actions, rewards = batch  # each step of each cart; a reward of 0 follows the fall
        to_come = rewards.flip(0).cumsum(0).flip(0)
        advantage = to_come - to_come.mean(dim=1, keepdim=True)
        advantage = advantage / (advantage.std() + 1e-6)
        log_probability = self.net(states).log_softmax(dim=2).gather(2, actions.unsqueeze(2)).squeeze(2)
        self.log("return", rewards.sum(dim=0).mean(), prog_bar=True)
        gain: Tensor = (log_probability * advantage * rewards).sum() / rewards.sum()
        return -gain

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Episodes(IterableDataset[Batch]):
    """Plays with the policy's current weights: each batch is an episode of every cart."""

    def __init__(self, policy: Policy, carts: int, batches: int) -> None:
        self.policy = policy
        self.carts = carts
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.batches):
            yield play(self.policy, self.carts)


@torch.no_grad()
def play(policy: Policy, count: int) -> Batch:
    """Returns the states, the pushes and the rewards of ``count`` carts, until the last pole has fallen."""
    carts = CartPoles(count)
    states: list[Tensor] = []
    actions: list[Tensor] = []
    rewards: list[Tensor] = []
    while carts.upright.any() and len(states) < LONGEST:
        chances = policy.net(carts.state).softmax(dim=1)
        action = chances.multinomial(1).squeeze(1)
        states.append(carts.state)
        actions.append(action)
        rewards.append(carts.push(action))
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def draw(path: str, returns: list[float], before: Batch, after: Batch) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(returns)
    left.axhline(LONGEST, color="0.7", linestyle="--")
    left.set(xlabel="step", ylabel="mean return of the carts")
    for (states, _, rewards), color, label in ((before, "0.6", "before training"), (after, "tab:red", "after")):
        angles = states[:, :, 2].where(rewards > 0, torch.nan).rad2deg()
        lines = right.plot(angles.numpy(), color=color, linewidth=0.8)
        lines[0].set_label(label)
    right.set(xlabel="push", ylabel="angle of each pole (degrees)")
    right.legend()
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a test of the script")
    parser.add_argument("--picture", help="draw the return over steps, and poles before and after, into this file")
    parser.add_argument("--folder", default="runs/rl", help="where logs and checkpoints go")
    options = parser.parse_args()

    seed_everything(1)
    policy = Policy()
    before = play(policy, 8)
    logger = CSVLogger(options.folder, name="rl")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        logger=logger,
    )
    # The Trainer gets the data set itself: a DataLoader over an IterableDataset is read one batch ahead of the step, and
    # each batch would be played with the weights before the last update.
    trainer.fit(policy, Episodes(policy, carts=16, batches=15 if options.quick else 80))
    with logger.metrics_file.open() as file:
        returns = [float(row["return"]) for row in csv.DictReader(file)]
    after = play(policy, 100)
    print(
        f"mean return: {returns[0]:.1f} in the first step, {float(after[2].sum()) / 100:.1f} of {LONGEST} after training"
    )
    if options.picture:
        draw(options.picture, returns, before, play(policy, 8))


if __name__ == "__main__":
    main()
