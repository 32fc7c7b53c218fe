"""Balances a pole by actor and critic in a loop of its own: both optimizers make one step together, of an episode just played."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fabricamp

LONGEST = 200  # steps after which an episode ends with success
Episode = tuple[Tensor, Tensor, Tensor]


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


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


@torch.no_grad()
def play(run: fabricamp.Loop, actor: nn.Module, count: int) -> Episode:
    """Returns the states, the pushes and the rewards of ``count`` carts, until the last pole has fallen."""
    carts = CartPoles(count)
    states: list[Tensor] = []
    actions: list[Tensor] = []
    rewards: list[Tensor] = []
    while carts.upright.any() and len(states) < LONGEST:
        chances = run.forward(actor, run.to_device(carts.state)).float().softmax(dim=1).cpu()
        action = chances.multinomial(1).squeeze(1)
        states.append(carts.state)
        actions.append(action)
        rewards.append(carts.push(action))
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80, help="episodes, each of all carts at once")
    parser.add_argument("--precision", default="O0")
    parser.add_argument("--folder", default="runs/own_loop/rl")
    options = parser.parse_args()

    run = fabricamp.Loop(precision=options.precision, devices=1, default_root_dir=options.folder, seed=1)
    actor, critic = network(2), network(1)
    of_actor = torch.optim.Adam(actor.parameters(), lr=0.02)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02)
    run.prepare(actor, critic, of_actor, of_critic, clip=1.0)

    def learn(episode: Episode) -> None:
        """One step of both: the critic learns what is to come, the actor what was better than that."""
        states, actions, rewards = episode
        to_come = rewards.flip(0).cumsum(0).flip(0)
        value = critic(states).float().squeeze(2)
        mask = rewards / rewards.sum()
        run.backward(((value - to_come / LONGEST).square() * mask).sum())
        advantage = to_come - LONGEST * value.detach()
        advantage = advantage / (advantage.std() + 1e-6)
        scores = actor(states).float().log_softmax(dim=2)
        chosen = scores.gather(2, actions.unsqueeze(2)).squeeze(2)
        run.backward(-(chosen * advantage * mask).sum())
        run.update(of_actor, of_critic)

    run.restore("last")
    returns = 0.0
    while run.global_step < options.steps:
        episode = play(run, actor, 16)
        run.step(learn, run.to_device(episode))
        returns = float(episode[2].sum()) / 16
        if run.global_step % 10 == 0:
            run.print(f"step {run.global_step}: mean return {returns:.1f}")
            run.save("last")
    after = float(play(run, actor, 100)[2].sum()) / 100
    run.print(f"mean return: {after:.1f} of {LONGEST} after training")
    run.close()


if __name__ == "__main__":
    main()
