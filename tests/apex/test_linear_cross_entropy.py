"""A loss without stored logits under apex's names: at every level as with stored logits, and through accumulated losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.apex import amp
from fabricamp.nn import FusedLinearCrossEntropy
from fabricamp.ops import fused_linear_cross_entropy
from tests.unstored_logits import small_chunks

FAR = {"O0": 1e-5, "O1": 1e-3, "O2": 1e-3, "O3": 3e-3}  # of the change by training


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.body = nn.Sequential(nn.Embedding(36, 16), nn.Linear(16, 16), nn.Tanh())
        head = nn.Linear(16, 36)
        self.head = head if way == "stored" else FusedLinearCrossEntropy.of(head)

    def forward(self, tokens, targets):
        hidden = self.body(tokens)
        if self.way == "head":
            return self.head(hidden, targets)
        if self.way == "function":
            return fused_linear_cross_entropy(hidden, self.head.weight, targets, self.head.bias)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


def trained(way, level):
    """Returns the change of the weights by steps of two scaled losses each."""
    net = Net(way)
    first = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    tokens = torch.randint(36, (8, 15), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(1)
    targets[:, ::3] = -100
    for _ in range(4):
        for part in range(2):
            loss = net(tokens[part::2], targets[part::2]) * 1.5
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.double() - first[name] for name, value in net.state_dict().items()}


@pytest.mark.parametrize("level", FAR)
def test_trains_as_stored_logits_do(level, monkeypatch):
    small_chunks(monkeypatch.setattr)
    expected = trained("stored", level)
    for way in ("head", "function"):
        for name, value in trained(way, level).items():
            assert (value - expected[name]).norm() < FAR[level] * expected[name].norm(), name
