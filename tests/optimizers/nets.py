"""A small network for tests of optimizers, equal gradients for several copies of it, and a plain optimizer as the reference."""

from __future__ import annotations

import torch
from torch import nn


def net(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 1)
    return nn.Sequential(*layers).to(device, dtype).to(memory_format=torch.channels_last)


def gradients(module, step, scale=1.0):
    """Sets a gradient for each parameter; in every other step its layout differs from the parameter's."""
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        value = value.to(parameter.device, parameter.dtype)
        parameter.grad = value if step % 2 else torch.empty_like(parameter).copy_(value)


def assert_same(one, other, tolerance=1e-5):
    for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


class Plain(torch.optim.Optimizer):
    """An optimizer in fp64, tensor by tensor; a subclass defines ``direction``, and may override ``norm_of_all``."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        every = [p.grad.double() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([one.norm() for one in every]).norm() if every else torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                wide = p.double()
                p.copy_(wide - float(group["lr"]) * self.direction(p.grad.double(), wide, state, group, norm))


def average(state, name, value, beta, new):
    """Returns a running average, kept in ``state``."""
    state[name] = beta * state.get(name, torch.zeros_like(value)) + new * value
    return state[name]
