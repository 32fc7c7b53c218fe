"""On a GPU: graphs, streams, no allocation, no wait, bit-equal runs, large tensors, two devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import references
from tests.windows import add_up, end_step, make_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def parameters(count=40, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 300_000, (count,), generator=generator).tolist()
    made = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    for one in made:
        one.grad = torch.randn(one.shape, generator=generator).to(device)
    return made


def clipped_step(optimizer, state):
    optimizer.gather()
    ops.finish(state, optimizer.statistics(state.scale), scale=state.scale, max_norm=1.0)
    optimizer.steer(state)
    optimizer.step()


def test_real_chunks_against_reference_and_torch():
    mine, reference, torchs = parameters(), parameters(), parameters()
    optimizers = [
        FusedAdam(mine, lr=0.01, weight_decay=0.1),
        FusedAdam(reference, lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(torchs, lr=0.01, weight_decay=0.1, fused=True),
    ]
    for _ in range(10):
        optimizers[0].step()
        with references(torch.device("cuda")):
            optimizers[1].step()
        optimizers[2].step()
    for one, two, three in zip(mine, reference, torchs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-6)


def test_two_runs_are_bit_equal():
    results = []
    for _ in range(2):
        own, state = parameters(), ops.StepState.on("cuda")
        optimizer = FusedAdam(own, lr=0.01)
        for _ in range(5):
            clipped_step(optimizer, state)
        results.append([*own, state.norm])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_captured_step_replays_with_another_lr():
    mine, twin = parameters(), parameters()
    optimizer, eager = FusedAdam(mine, lr=0.01), FusedAdam(twin, lr=0.01)
    states = ops.StepState.on("cuda"), ops.StepState.on("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            clipped_step(optimizer, states[0])
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            clipped_step(optimizer, states[0])
    torch.cuda.synchronize()
    for _ in range(2):
        clipped_step(eager, states[1])
    for lr in (0.01, 0.002, 0.03):
        optimizer.param_groups[0]["lr"] = eager.param_groups[0]["lr"] = lr
        for one, other in zip(mine, twin, strict=True):
            one.grad.mul_(0.5)
            other.grad.mul_(0.5)
        optimizer.gather()  # uploads the changed values
        graph.replay()
        clipped_step(eager, states[1])
    assert all(torch.equal(one, other) for one, other in zip(mine, twin, strict=True))
    assert {state["step"].item() for state in optimizer.state.values()} == {5.0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)], nn.BatchNorm1d(256))

    def forward(self, x):
        return self.layers(x)


def trained(level, accumulate=1):
    torch.manual_seed(0)
    module, precision = Net().cuda(), OptLevel(level)
    precision.convert_module(module)
    optimizer = FusedAdam(module.parameters(), lr=1e-3)
    precision.setup_optimizers(module, [optimizer], Strategy(), accumulates=accumulate > 1)
    return module, precision, optimizer


def window(module, precision, optimizer, x, accumulate=1):
    for _ in range(accumulate):
        loss = precision.forward(lambda: F.mse_loss(module(precision.convert_input(x)).float(), x))
        precision.backward(loss)
        add_up(precision, optimizer)
    make_step(precision, optimizer, clip=Clip(1.0))
    end_step(precision, loss.detach())
    optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_an_update_neither_allocates_nor_waits(level, accumulate):
    module, precision, optimizer = trained(level, accumulate)
    x = torch.randn(64, 256, device="cuda")
    for _ in range(6):
        window(module, precision, optimizer, x, accumulate)
    loss = torch.zeros((), device="cuda")
    gradients = {p: torch.randn_like(p) for p in precision.gradients(optimizer).parameters}
    for step in range(5):
        for p, gradient in gradients.items():
            p.grad = gradient
        add_up(precision, optimizer)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            make_step(precision, optimizer, clip=Clip(1.0))
            end_step(precision, loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step > 0:
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_host_runs_ahead_of_a_busy_gpu():
    module, precision, optimizer = trained("O2")
    x = torch.randn(64, 256, device="cuda")
    for _ in range(6):
        window(module, precision, optimizer, x)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9))  # about two seconds
    busy = torch.cuda.current_stream().record_event()
    for _ in range(2):
        window(module, precision, optimizer, x)
    assert not busy.query()
    torch.cuda.synchronize()


def test_gradients_that_move_every_step():
    mine, twin = parameters(), parameters()
    optimizer, reference = FusedAdam(mine, lr=0.01), torch.optim.AdamW(twin, lr=0.01, weight_decay=0.0, fused=True)
    kept = []
    for step in range(20):
        for one, other in zip(mine, twin, strict=True):
            one.grad = torch.full_like(one, float(step % 3) - 1)
            other.grad = one.grad
            kept.append(one.grad if step % 2 else None)
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.step()
        reference.step()
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.gpu_memory(gib=26)  # two half tensors and two fp32 moments
def test_more_than_two_to_the_31_elements():
    count = 2**31 + 70_000
    weight = nn.Parameter(torch.ones(count, dtype=torch.float16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer, state = FusedAdam([weight], lr=0.5), ops.StepState.on("cuda")
    weight.grad[-1] = float("inf")
    clipped_step(optimizer, state)
    assert (state.found_inf.item(), weight.max().item()) == (1.0, 1.0)
    weight.grad[-1] = 1.0
    optimizer.step()
    assert (weight.min().item(), weight.max().item()) == (0.5, 0.5)
    assert ops.l2norm([weight.detach()])[0].item() == pytest.approx(0.5 * count**0.5, rel=1e-4)


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_parameters_on_two_devices():
    mine, twin = parameters(10) + parameters(10, "cuda:1"), parameters(10) + parameters(10, "cuda:1")
    optimizer, reference = FusedAdam(mine, lr=0.01), torch.optim.AdamW(twin, lr=0.01, weight_decay=0.0, fused=True)
    state = ops.StepState.on("cuda:0")
    for _ in range(5):
        clipped_step(optimizer, state)
        torch.nn.utils.clip_grad_norm_(twin, 1.0)
        reference.step()
        for one, other in zip(mine, twin, strict=True):
            other.grad.copy_(one.grad)
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.cuda.current_device() == 0
