"""Every level against a loop written by hand: same weights, whatever optimizer, clipping and accumulation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.precision import Clip, OptLevel, precision_from
from fabricamp.strategies.base import Strategy

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}
CLIPS = {"none": None, "norm": Clip(0.05), "value": Clip(0.01, "value")}
WINDOWS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # before BatchNorm its gradient is noise
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def task() -> Task:
    torch.manual_seed(0)
    return Task()


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)
    ]


def start(precision, module, make_optimizer, accumulate=1, strategy=None):
    precision.accumulating = accumulate > 1
    precision.convert_module(module)
    optimizer = make_optimizer(module.parameters())
    precision.setup_optimizers(module, [optimizer], strategy or Strategy())
    return optimizer


def window(precision, module, optimizer, micro_batches, clip=None, spoil=None, look=None):
    """One update window, in the order in which the loop does it."""
    loss = None
    for index, batch in enumerate(micro_batches):
        loss = precision.forward(module.training_step, precision.convert_input(batch))
        assert loss.dtype is torch.float32
        if index == 0:
            optimizer.zero_grad()
        precision.backward(loss / len(micro_batches))
        if spoil is not None:
            spoil(module)
        if precision.accumulation_buffers() is not None:
            precision.accumulate()
    if look is not None:
        precision.unscale(optimizer)
        look(module, optimizer)
    precision.step(optimizer, clip=clip)
    return precision.close_window(loss.detach())


def train(precision, module, make_optimizer, clip=None, accumulate=1):
    optimizer = start(precision, module, make_optimizer, accumulate)
    data = batches(WINDOWS * accumulate)
    for index in range(WINDOWS):
        window(precision, module, optimizer, data[index * accumulate : (index + 1) * accumulate], clip)
    return optimizer


def reference(level: str, make_optimizer, clip, accumulate):
    """The same by hand, in plain torch: half copies, fp32 masters, fp32 sums of half gradients, no scaling where it cancels."""
    module = task()
    dtype = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level)
    autocast = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    scale = 2.0**16 if level in {"O1", "O2"} else 1.0
    keep = level in {"O2", "O5"}
    parameters = list(module.parameters())
    full = [nn.Parameter(p.detach().clone()) for p in parameters]
    if dtype is not None:
        for child in (module.net.first, module.net.last, *([] if keep else [module.net.norm])):
            child.to(dtype)
    masters = full if keep else parameters
    optimizer = make_optimizer(masters)
    data = batches(WINDOWS * accumulate)
    for index in range(WINDOWS):
        sums = [torch.zeros_like(m) for m in masters]
        module.zero_grad()
        for x, y in data[index * accumulate : (index + 1) * accumulate]:
            if autocast is not None:
                with torch.autocast("cpu", autocast):
                    loss = F.cross_entropy(module.net(x), y)
            else:
                loss = F.cross_entropy(module.net(x if dtype is None else x.to(dtype)).float(), y)
            (loss / accumulate * scale).backward()
            if keep:
                for total, p in zip(sums, parameters):
                    total += p.grad.float()
                    p.grad = None
        for total, m, p in zip(sums, masters, parameters):
            m.grad = (total if keep else p.grad.float()).div_(scale).to(m.dtype)
        if clip is not None and clip.algorithm == "norm" and level in {"O0", "O4"}:
            nn.utils.clip_grad_norm_(masters, clip.value)
        elif clip is not None and clip.algorithm == "norm":
            norm = torch.sqrt(sum(m.grad.double().square().sum() for m in masters))
            coefficient = min(1.0, clip.value / (norm.item() + 1e-6))
            for m in masters:
                m.grad = (m.grad.float() * coefficient).to(m.dtype)
        elif clip is not None:
            nn.utils.clip_grad_value_(masters, clip.value)
        optimizer.step()
        if keep:
            for m, p in zip(masters, parameters):
                p.data.copy_(m)
    return module, masters


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_equals_a_loop_by_hand(level, optimizer, clip, accumulate):
    if level == "O3" and optimizer.startswith("adam"):
        pytest.skip("Adam's eps of 1e-8 is 0 in half")
    make, limit = OPTIMIZERS[optimizer], CLIPS[clip]
    module, precision = task(), OptLevel(level)
    updated = [p for g in train(precision, module, make, limit, accumulate).param_groups for p in g["params"]]
    expected, masters = reference(level, make, limit, accumulate)
    exact = clip != "norm" or level in {"O0", "O4"}
    for mine, theirs in zip([*updated, *module.parameters()], [*masters, *expected.parameters()]):
        assert mine.dtype == theirs.dtype
        if exact:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=2e-3 if mine.dtype != torch.float32 else 1e-5, atol=1e-5)
