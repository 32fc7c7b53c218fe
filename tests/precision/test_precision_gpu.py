"""On a GPU: the same levels, no hidden wait, and activation checkpointing in autograd's own threads."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp.precision import Clip, OptLevel
from fabricamp.precision.loss_scaler import LossScaler
from fabricamp.strategies.base import Strategy
from tests.windows import add_up, end_step, make_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32), nn.Linear(32, 2)
    ).cuda()


def prepared(level, accumulate=1, **options):
    module, precision = net(), OptLevel(level, **options)
    precision.convert_module(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    if level == "O3":  # Adam's eps of 1e-8 is 0 in half
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True)
    precision.setup_optimizers(module, [optimizer], Strategy(), accumulates=accumulate > 1)
    return module, precision, optimizer


def data():
    x = torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x.cuda(), (x.mean((1, 2, 3)) > 0).long().cuda()


def window(module, precision, optimizer, x, y, accumulate=1, factor=1.0):
    optimizer.zero_grad()
    for _ in range(accumulate):
        loss = precision.forward(lambda: F.cross_entropy(module(x), y))
        precision.backward(loss * factor / accumulate)
        add_up(precision, optimizer)
    make_step(precision, optimizer, clip=Clip(1.0))
    return loss.detach(), end_step(precision, loss.detach())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_learn_and_never_wait(level, accumulate):
    parts, (x, y) = prepared(level, accumulate), data()
    first = window(*parts, x, y, accumulate)[0].item()
    for _ in range(3):
        window(*parts, x, y, accumulate)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            last, _ = window(*parts, x, y, accumulate)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert last.item() < first * 0.8


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_windows_are_issued_behind_a_long_kernel(level):
    parts, (x, y) = prepared(level), data()
    for _ in range(4):
        window(*parts, x, y)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    busy = torch.cuda.current_stream().record_event()
    for _ in range(2):
        window(*parts, x, y)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_verdicts_come_two_windows_later(level):
    parts, (x, y) = prepared(level), data()
    factors = [1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0]
    told = [window(*parts, x, y, factor=factor)[1] for factor in factors] + parts[1].verdicts.drain()
    assert told[:2] == [None, None]
    assert [verdict.applied for verdict in told[2:]] == [factor == 1.0 for factor in factors]
    assert (told[-1].applied_steps, told[-1].skipped_steps, told[-1].scale) == (4, 2, 2.0**14)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_checkpointing_from_the_step_and_in_a_forward(level, reentrant):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen = []

        def run(self, x):
            self.seen.append(x.dtype)
            return self.net(x)

        def forward(self, x):
            return checkpoint(self.run, x, use_reentrant=reentrant)

    outer, precision = Outer(), OptLevel(level, loss_scale=64.0)
    precision.convert_module(outer)
    x = data()[0].requires_grad_()
    loss = precision.forward(lambda: checkpoint(outer, x, use_reentrant=reentrant).square().mean())
    precision.backward(loss)
    assert len(outer.seen) > 1
    assert len(set(outer.seen)) == 1
    assert all(parameter.grad is not None for parameter in outer.parameters())


def test_an_lstm_is_flat_after_conversion(recwarn):
    lstm, precision = nn.LSTM(8, 8, num_layers=2).cuda(), OptLevel("O2")
    precision.convert_module(lstm)
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
    precision.setup_optimizers(lstm, [optimizer], Strategy())
    for _ in range(2):
        precision.backward(precision.forward(lambda: lstm(torch.randn(3, 2, 8, device="cuda"))[0].square().mean()))
        make_step(precision, optimizer)
    assert not [one for one in recwarn if "contiguous chunk" in str(one.message)]


def test_a_window_that_ends_late_writes_to_nobody_elses_memory():
    """Kernels write the step status into pinned memory; if its owner is deleted meanwhile, no batch gets this memory."""
    loss = torch.ones((), device="cuda")
    scaler = LossScaler("cuda")
    scaler.end_step(loss)
    torch.cuda.synchronize()
    size = scaler._host.numel()
    torch.cuda._sleep(int(1e9))  # half a second
    scaler.end_step(loss)
    del scaler
    gc.collect()
    lent = [torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert not any(one.any() for one in lent)
