"""On a GPU, for each kind of optimizer: real chunks, graphs, no allocation, no wait, bit-equal runs, two devices, large tensors.

FusedAdam, and what a Precision makes of a step, are in ``test_fused_gpu``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from tests.cuda_on_cpu.compiler import references

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
KINDS = {
    "lamb": lambda p: FusedLAMB(p, lr=0.01),
    "mixed precision lamb": lambda p: FusedMixedPrecisionLamb(p, lr=0.01, use_nvlamb=True),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.01, weight_decay=0.1),
    "novograd of largest": lambda p: FusedNovoGrad(p, lr=0.01, norm_type=0, reg_inside_moment=True),
    "sgd": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.01, lr_decay=0.1),
    "lion": lambda p: FusedLion(p, lr=1e-3, weight_decay=0.1),
    "larc": lambda p: LARC(FusedSGD(p, lr=0.01, momentum=0.9, weight_decay=0.1)),
}


def parameters(count=30, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 300_000, (count,), generator=generator).tolist()
    made = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    for one in made:
        one.grad = torch.randn(one.shape, generator=generator).to(device)
    return made


def steered_step(optimizer, state):
    if isinstance(optimizer, LARC):  # LARC gets flag and multiplier as from torch's GradScaler
        norm = torch.nn.utils.get_total_norm([p.grad for group in optimizer.param_groups for p in group["params"]])
        state.found_inf.copy_(norm.isfinite().logical_not_())
        optimizer.found_inf, optimizer.grad_scale = state.found_inf, state.scale
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
        return
    optimizer.gather()
    ops.finish(state, optimizer.statistics(state.scale), scale=state.scale, max_norm=100.0)
    optimizer.steer(state)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_real_chunks_against_reference_and_cpu(kind):
    mine, reference, on_cpu = parameters(), parameters(), parameters(device="cpu")
    optimizers = [KINDS[kind](own) for own in (mine, reference, on_cpu)]
    for _ in range(10):
        optimizers[0].step()
        with references(torch.device("cuda")):
            optimizers[1].step()
        optimizers[2].step()
    for one, two, three in zip(mine, reference, on_cpu, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.cpu(), three, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_bit_equal(kind):
    results = []
    for _ in range(2):
        own, state = parameters(), ops.StepState.on("cuda")
        optimizer = KINDS[kind](own)
        for step in range(6):
            if step % 2:
                steered_step(optimizer, state)
            else:
                optimizer.step()
        results.append(own)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_replays_with_another_lr(kind, steered):
    mine, twin = parameters(), parameters()
    optimizer, eager = KINDS[kind](mine), KINDS[kind](twin)
    states = ops.StepState.on("cuda"), ops.StepState.on("cuda")

    def step(one, state):
        if steered:
            steered_step(one, state)
        else:
            one.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(optimizer, states[0])
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step(optimizer, states[0])
    torch.cuda.synchronize()
    for _ in range(2):
        step(eager, states[1])
    for lr in (0.01, 0.002, 0.03):
        for group in (optimizer.param_groups[0], eager.param_groups[0]):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for one, other in zip(mine, twin, strict=True):
            one.grad.mul_(0.5)
            other.grad.mul_(0.5)
        optimizer.gather()  # uploads the changed values
        graph.replay()
        step(eager, states[1])
    assert all(torch.equal(one, other) for one, other in zip(mine, twin, strict=True))
    assert {state["step"].item() for state in optimizer.state.values() if "step" in state} <= {5.0}


@pytest.mark.parametrize(
    ("kind", "steered"),
    [(kind, steered) for kind in KINDS for steered in (False, True) if (kind, steered) != ("larc", True)],
)
def test_a_step_neither_allocates_nor_waits(kind, steered):
    optimizer, state = KINDS[kind](parameters()), ops.StepState.on("cuda")
    step = (lambda: steered_step(optimizer, state)) if steered else optimizer.step
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("kind", ["lamb", "novograd", "sgd", "adagrad", "lion", "larc"])
def test_parameters_on_two_devices(kind):
    mine, twin = parameters(10) + parameters(10, "cuda:1"), parameters(10) + parameters(10)
    optimizer, reference = KINDS[kind](mine), KINDS[kind](twin)
    states = ops.StepState.on("cuda:0"), ops.StepState.on("cuda:0")
    for step in range(4):
        for one, state in zip((optimizer, reference), states, strict=True):
            if step % 2:
                steered_step(one, state)
            else:
                one.step()
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-5, atol=1e-6)


PLAIN = {
    "lamb": lambda p: FusedLAMB(p, lr=0.5, weight_decay=0.01),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.5),
    "sgd": lambda p: FusedSGD(p, lr=0.5, momentum=0.9),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.5),
    "lion": lambda p: FusedLion(p, lr=0.5),
    "larc": lambda p: LARC(FusedSGD(p, lr=0.5), trust_coefficient=1.0, clip=False),
}


@pytest.mark.slow
@pytest.mark.gpu_memory(gib=26)  # two half tensors, and for LAMB two fp32 moments
@pytest.mark.parametrize("kind", PLAIN)
def test_more_than_two_to_the_31_elements(kind):
    count = 2**31 + 70_000
    weight = nn.Parameter(torch.ones(count, dtype=torch.float16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    weight.grad[-1] = float("inf")
    optimizer, state = PLAIN[kind]([weight]), ops.StepState.on("cuda")
    steered_step(optimizer, state)
    assert (state.found_inf.item(), weight.max().item()) == (1.0, 1.0)
    weight.grad[-1] = 1.0
    optimizer.step()
    expected = 1.0 if kind == "novograd" else 0.5  # NovoGrad's update is 0.5 divided by the norm, the root of 2**31
    assert (weight.min().item(), weight.max().item()) == (expected, expected)
    if kind == "novograd":
        assert optimizer.state[weight]["exp_avg_norm"].item() == pytest.approx(count**0.5, rel=1e-5)
