"""Shared by the tests of amp: a small net, its data, optimizers by name, and a loop as in users' scripts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.apex import amp
from fabricamp.optimizers import FusedAdam, FusedLAMB, FusedSGD

LEVELS = ("O0", "O1", "O2", "O3")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4),  # 1e-8 is 0 in fp16
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01),
}
ALL_OPTIMIZERS = {
    **OPTIMIZERS,
    "AdamFused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.05, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def encode(self, x):
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x):
        return self.last(self.encode(x))


def net(seed=0, device="cpu"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net().to(device)


def batch(index, device="cpu"):
    generator = torch.Generator().manual_seed(1000 + index)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return x.to(device), y.to(device)


def start(level, optimizer="SGD", seed=0, device="cpu", **options):
    model = net(seed, device)
    return amp.initialize(model, ALL_OPTIMIZERS[optimizer](model.parameters()), opt_level=level, verbosity=0, **options)


def loss_of(model, index):
    x, y = batch(index, next(model.parameters()).device)
    return F.cross_entropy(model(x), y)


def train(model, optimizer, steps):
    """Trains steps as in users' scripts; returns the losses."""
    losses = []
    for index in steps:
        loss = loss_of(model, index)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def spoil(optimizer, loss, value=float("inf")):
    """Runs a backward with one non-finite gradient, inside ``scale_loss``."""
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        (scaled_loss * value).backward()


def snapshot(model, optimizer):
    tensors = [*model.state_dict().values(), *amp.master_params(optimizer)]
    return [tensor.detach().clone() for tensor in tensors]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
