"""Every level with one of our optimizers: the same weights as with torch's, in three launches, without a change of ``.grad``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.gradients.flat import Gradients
from fabricamp.ops import bridge
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import kernel_device
from tests.pairs import pairs
from tests.windows import add_up, end_step, make_step

__all__ = ["kernel_device"]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CLIPS = {"none": None, "norm": Clip(0.05), "value": Clip(0.01, "value")}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 40, bias=False), nn.BatchNorm1d(40), nn.Linear(40, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def start(device, level, fused, accumulate=1, **options):
    torch.manual_seed(0)
    module, precision = Net().to(device), OptLevel(level, **options)
    precision.convert_module(module)
    kind = FusedAdam if fused else torch.optim.AdamW
    optimizer = kind(module.parameters(), lr=0.01, weight_decay=0.01, eps=1e-4)
    precision.setup_optimizers(module, [optimizer], Strategy(), accumulates=accumulate > 1)
    return module, precision, optimizer


def backward(module, precision, optimizer, device, index, accumulate=1, bad=False):
    for part in range(accumulate):
        generator = torch.Generator().manual_seed(index * 10 + part)
        x, y = (
            torch.randn(8, 6, generator=generator).to(device),
            torch.randint(0, 3, (8,), generator=generator).to(device),
        )
        loss = precision.forward(lambda x=x, y=y: F.cross_entropy(module(precision.convert_input(x)).float(), y))
        precision.backward(loss / accumulate)
        if bad:
            module.last.weight.grad.view(-1)[5] = float("inf")
        add_up(precision, optimizer)
    return loss.detach()


def updated(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("level", "clip", "accumulate"),
    pairs([level for level in LEVELS if level != "O3"], CLIPS, [1, 2]),  # at O3 torch keeps Adam's state in half
)
def test_the_same_weights_as_with_torchs_adamw(kernel_device, level, clip, accumulate):
    (mine, *ours), (twin, *theirs) = (start(kernel_device, level, fused, accumulate) for fused in (True, False))
    skipped = []
    for index in range(5):
        bad = level in ("O1", "O2") and index == 2
        for module, (precision, optimizer) in ((mine, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss = backward(module, precision, optimizer, kernel_device, index, accumulate, bad=bad)
            make_step(precision, optimizer, clip=CLIPS[clip])
            verdict = end_step(precision, loss)
            skipped.append(verdict and verdict.skipped_steps)
        # Copies the weights, so that the next gradients are computed from equal weights.
        for one, other in zip(updated(ours[1]), updated(theirs[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
            other.data.copy_(one)
        for one, other in zip(mine.parameters(), twin.parameters(), strict=True):
            other.data.copy_(one)
    assert skipped[0::2] == skipped[1::2]
    verdicts = ours[0].verdicts
    assert [v.skipped_steps for v in verdicts.drain()] == [1, 1] if level in ("O1", "O2") else verdicts is None


def test_pure_half_has_the_update_of_fp32_state(kernel_device):
    module, precision, optimizer = start(kernel_device, "O3", fused=True)
    before = [p.detach().float() for p in module.parameters()]
    backward(module, precision, optimizer, kernel_device, 0)
    gradients = [None if p.grad is None else p.grad.float() for p in module.parameters()]
    make_step(precision, optimizer, clip=Clip(1e-3, "value"))
    for old, gradient, p in zip(before, gradients, module.parameters(), strict=True):
        if gradient is None:
            assert torch.equal(p, old.half())
            continue
        limited = gradient.clamp(-1e-3, 1e-3)
        expected = old * (1 - 0.01 * 0.01) - 0.01 * limited / (limited.abs() + 1e-4)
        torch.testing.assert_close(p.float(), expected, rtol=1e-3, atol=1e-4)


def test_half_weights_are_the_rounded_masters_and_grad_is_left_alone(kernel_device):
    for level in ("O2", "O5"):
        module, precision, optimizer = start(kernel_device, level, fused=True)
        backward(module, precision, optimizer, kernel_device, 0)
        assert module.last.weight.grad is not None
        make_step(precision, optimizer, clip=Clip(0.1))
        for holder, master in zip(precision.gradients(optimizer).parameters, updated(optimizer), strict=True):
            assert torch.equal(holder, master.to(holder.dtype))
            assert master.grad is None or master is holder
    module, precision, optimizer = start(kernel_device, "O1", fused=True)
    backward(module, precision, optimizer, kernel_device, 0)
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    make_step(precision, optimizer, clip=Clip(0.1))
    for old, p in zip(before, module.parameters(), strict=True):
        assert (old is None and p.grad is None) or torch.equal(old, p.grad)


@pytest.mark.parametrize(("level", "clip", "expected"), [
    ("O1", "norm", ["sum_squares", "finish", "adam"]),
    ("O2", "norm", ["sum_squares", "finish", "adam"]),
    ("O2", "none", ["sum_squares", "finish", "adam"]),
    ("O2", "value", ["sum_squares", "finish", "adam"]),
    ("O5", "norm", ["sum_squares", "finish", "adam"]),
    ("O5", "none", ["finish", "adam"]),
    ("O0", "norm", ["sum_squares", "finish", "adam"]),
    ("O0", "none", ["adam"]),
])  # fmt: skip
def test_an_update_is_three_launches(kernel_device, monkeypatch, level, clip, expected):
    module, precision, optimizer = start(kernel_device, level, fused=True)
    launched = []
    real = bridge.COMPILERS[kernel_device.type]

    def spy(text, function, device):
        run = real(text, function, device)

        def launch(*arguments):
            launched.append(function)
            run(*arguments)

        return launch

    monkeypatch.setitem(bridge.COMPILERS, kernel_device.type, spy)
    bridge.kernel.cache_clear()
    for index in range(2):
        optimizer.zero_grad()
        backward(module, precision, optimizer, kernel_device, index)
        launched.clear()
        make_step(precision, optimizer, clip=CLIPS[clip])
        assert launched == expected
    bridge.kernel.cache_clear()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_from_elsewhere_with_their_divisor_and_flags(kernel_device, level):
    (mine, *ours), (twin, *theirs) = (start(kernel_device, level, fused) for fused in (True, False))
    results = []
    for module, (precision, optimizer) in ((mine, ours), (twin, theirs)):
        holders = precision.gradients(optimizer).parameters
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in holders]
        present = torch.tensor([float(index != 1) for index in range(len(holders))], device=kernel_device)
        for _ in range(3):
            twice = [value.clone() * 4 for value in values]
            make_step(precision, optimizer, Gradients(tensors=twice, divisor=4.0, present=present), clip=Clip(1.0))
            if level == "O0":
                optimizer.zero_grad()
        results.append([p.detach().clone() for p in updated(optimizer)])
        del module
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_hooks_that_look_see_unscaled_gradients(kernel_device, level):
    (mine, *ours), (twin, *theirs) = (start(kernel_device, level, fused) for fused in (True, False))
    for index in range(3):
        seen = []
        for module, (precision, optimizer) in ((mine, ours), (twin, theirs)):
            optimizer.zero_grad()
            backward(module, precision, optimizer, kernel_device, index)

            def look(module=module):
                seen.append(module.last.weight.grad.float().clone())
                module.last.weight.grad.mul_(0.5)
                return Clip(0.5)

            make_step(precision, optimizer, look=look)
            end_step(precision, None)
        torch.testing.assert_close(*seen, rtol=5e-2, atol=5e-3)
        for one, other in zip(updated(ours[1]), updated(theirs[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_nothing_is_skipped_without_a_dynamic_scale(kernel_device, level):
    options = {"loss_scale": 128.0} if level == "O2" else {}
    module, precision, optimizer = start(kernel_device, level, fused=True, **options)
    backward(module, precision, optimizer, kernel_device, 0, bad=True)
    make_step(precision, optimizer, clip=Clip(1.0))
    assert module.last.weight.isnan().any()
    assert precision.verdicts is None
