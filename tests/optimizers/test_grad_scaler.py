"""The contents of ``.grad`` after a step by torch's GradScaler: the same with our fused optimizers as with torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp import optimizers
from tests.cuda_on_cpu.compiler import one_order

SCALE = 1024.0
OPTIMIZERS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.01),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.01, momentum=0.9),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.01),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.01),
    "FusedLion": lambda p: optimizers.FusedLion(p, lr=0.01),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.01),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.01),
    "LARC": lambda p: optimizers.LARC(optimizers.FusedSGD(p, lr=0.01), trust_coefficient=1e6),
}


def left_behind(make, device, *, dtype=torch.float32, unscales=False, overflows=False):
    """Returns the gradients before and after ``scaler.step``, and the weights after it."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in ((7, 5), (3,), (2,))
    ]
    optimizer = make(weights)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))  # creates the scaler's scale
    for weight in weights[:2]:  # the last one has none
        weight.grad = (torch.randn(weight.shape, generator=generator) * 4e-4 * SCALE).to(device, dtype)
    if overflows:
        weights[1].grad[1] = float("inf")
    before = [weight.grad.clone() for weight in weights[:2]]
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weights[2].grad is None
    return before, [weight.grad for weight in weights[:2]], weights


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@one_order
def test_gradients_are_what_torchs_fused_optimizer_leaves(name, unscales, overflows, kernel_device):
    given = {"unscales": unscales, "overflows": overflows}
    _, expected, _ = left_behind(lambda p: torch.optim.AdamW(p, fused=True), torch.device("cpu"), **given)
    _, found, _ = left_behind(OPTIMIZERS[name], kernel_device, **given)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedMixedPrecisionLamb"])
@one_order
def test_half_gradients_are_rounded_behind_the_update_not_before_it(name, kernel_device):
    before, found, weights = left_behind(OPTIMIZERS[name], kernel_device, dtype=torch.float16)
    for one, scaled in zip(found, before, strict=True):
        assert one.dtype is torch.float16
        assert torch.equal(one, (scaled.float() / SCALE).half())
    # The same update with gradients that are not rounded to half.
    generator = torch.Generator().manual_seed(0)
    twins = [torch.randn(shape, generator=generator).to(kernel_device, torch.float16) for shape in ((7, 5), (3,), (2,))]
    twins = [nn.Parameter(one.float()) for one in twins]
    for twin, scaled in zip(twins, before, strict=False):
        twin.grad = scaled.float() / SCALE
    OPTIMIZERS[name](twins).step()
    for weight, twin in zip(weights, twins, strict=True):
        assert torch.equal(weight, twin.half())


@one_order
def test_a_step_alone_leaves_gradients_as_they_are(kernel_device):
    weight = nn.Parameter(torch.ones(3, device=kernel_device))
    weight.grad = torch.full_like(weight, 2.0)
    optimizers.FusedAdam([weight]).step()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
