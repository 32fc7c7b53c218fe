"""``clip_grad_norm_`` against torch's, by the kernels and by torch's own path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fabricamp
from fabricamp import ops
from fabricamp.ops import bridge
from tests.cuda_on_cpu.compiler import references

HALVES = (torch.float16, torch.bfloat16)


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((3,), (65, 2), (1,), (129,), (4, 5, 6)):
        one = nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        one.grad = torch.randn(shape, generator=generator).to(device, dtype)
        made.append(one)
    made[2].grad = None
    return made


def clipped(clip, own, *args, **options):
    norm = clip(own, *args, **options)
    return [norm, *[one.grad for one in own if one.grad is not None]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("norm_type", [2.0, 2, 1.0, 3.0, math.inf, 0.5])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_equals_torchs(kernel_device, dtype, norm_type, max_norm):
    mine = clipped(fabricamp.clip_grad_norm_, parameters(kernel_device, dtype), max_norm, norm_type)
    theirs = clipped(nn.utils.clip_grad_norm_, parameters(kernel_device, dtype), max_norm, norm_type)
    rtol, atol = (1e-2, 1e-2) if dtype in HALVES else (1e-5, 1e-6)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=rtol, atol=atol)
    with references(kernel_device):
        again = clipped(fabricamp.clip_grad_norm_, parameters(kernel_device, dtype), max_norm, norm_type)
    assert all(map(torch.equal, again, theirs))  # torch's own path


def test_two_launches_more_than_none(kernel_device, monkeypatch):
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
    ops.clip_grad_norm_(parameters(kernel_device), 1.0)
    assert launched == ["sum_squares", "norms", "scale"]
    launched.clear()
    ops.clip_grad_norm_(parameters(kernel_device, torch.float64), 1.0)
    assert launched == []
    bridge.kernel.cache_clear()


def test_a_norm_near_nothing(kernel_device):
    results = []
    for clip in (ops.clip_grad_norm_, nn.utils.clip_grad_norm_):
        own = parameters(kernel_device)
        for one in own:
            if one.grad is not None:
                one.grad.mul_(1e-7)
        results.append(clipped(clip, own, 1e-7))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


def test_mixed_dtypes_are_clipped_by_one_norm(kernel_device):
    own = [*parameters(kernel_device), *parameters(kernel_device, torch.float16)]
    gradients = [one.grad.double() for one in own if one.grad is not None]
    exact = torch.stack([one.square().sum() for one in gradients]).sum().sqrt()
    norm = ops.clip_grad_norm_(own, 0.5)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)
    for one, before in zip([one for one in own if one.grad is not None], gradients, strict=True):
        torch.testing.assert_close(one.grad.double(), before * 0.5 / exact, rtol=2e-3, atol=1e-5)


def test_forms_of_parameters(kernel_device):
    one = parameters(kernel_device)[0]
    torch.testing.assert_close(ops.clip_grad_norm_(one, 1e9), torch.linalg.vector_norm(one.grad))
    given = parameters(kernel_device)
    assert ops.clip_grad_norm_((one for one in given), 1.0).item() > 1.0
    assert torch.linalg.vector_norm(torch.cat([one.grad.flatten() for one in given if one.grad is not None])) < 1.001
    assert ops.clip_grad_norm_([], 1.0).item() == 0.0
    assert ops.clip_grad_norm_([nn.Parameter(torch.ones(2, device=kernel_device))], 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite(kernel_device, bad):
    for clip in (ops.clip_grad_norm_, nn.utils.clip_grad_norm_):
        own = parameters(kernel_device)
        own[3].grad[7] = bad
        before = [None if one.grad is None else one.grad.clone() for one in own]
        with pytest.raises(RuntimeError):
            clip(own, 1.0, error_if_nonfinite=True)
        for one, old in zip(own, before, strict=True):
            assert (one.grad is None and old is None) or torch.equal(one.grad.nan_to_num(), old.nan_to_num())
    norm = ops.clip_grad_norm_(own, 1.0)
    assert not torch.isfinite(norm)
    expected = parameters(kernel_device)
    expected[3].grad[7] = bad
    nn.utils.clip_grad_norm_(expected, 1.0)
    for one, other in zip(own, expected, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


def test_layouts(kernel_device):
    for view in (torch.Tensor.t, lambda x: x[::2], lambda x: x[:, 1:]):
        made = []
        for _ in range(2):
            gradient = view(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).to(kernel_device))
            made.append(nn.Parameter(torch.zeros(gradient.shape, device=kernel_device)))
            made[-1].grad = gradient
        torch.testing.assert_close(ops.clip_grad_norm_(made[0], 0.1), nn.utils.clip_grad_norm_(made[1], 0.1))
        torch.testing.assert_close(made[0].grad, made[1].grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_wait_without_the_error():
    own = parameters(torch.device("cuda"))
    for _ in range(2):
        ops.clip_grad_norm_(own, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.clip_grad_norm_(own, 1.0)
        with pytest.raises(RuntimeError, match="synchroniz"):
            ops.clip_grad_norm_(own, 1.0, error_if_nonfinite=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_devices():
    mine, theirs = ([*parameters(torch.device("cuda:0")), *parameters(torch.device("cuda:1"))] for _ in range(2))
    torch.testing.assert_close(ops.clip_grad_norm_(mine, 0.5), nn.utils.clip_grad_norm_(theirs, 0.5))
    for one, other in zip(mine, theirs, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)
