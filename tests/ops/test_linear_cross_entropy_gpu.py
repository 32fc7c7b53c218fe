"""Cross-entropy of hidden states and a head's weight on a GPU: vocabularies, memory, graphs, no wait, the compiler."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from fabricamp.ops import fused_linear_cross_entropy, linear_cross_entropy
from tests.ops.losses import DTYPES, truth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {FP32: 2e-5, FP16: 3e-3, BF16: 2e-2}


def sample(rows, classes, width, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape, scale=1.0):
        made = torch.empty(*shape, device="cuda").normal_(generator=generator) * scale
        return made.to(dtype).requires_grad_()

    hidden, weight = leaf(rows, width), leaf(classes, width, scale=width**-0.5)
    target = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    target[::5] = -100
    return hidden, weight, target


def gradients(*leaves):
    found = [one.grad for one in leaves]
    for one in leaves:
        one.grad = None
    return found


@pytest.mark.parametrize("accumulate", ["weight", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes", "width"), [(1000, 32000, 256), (777, 50257, 128), (2048, 5000, 512)])
def test_vocabularies(rows, classes, width, dtype, accumulate, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 2**22)
    hidden, weight, target = sample(rows, classes, width, dtype)
    scale = 65536.0 if dtype == FP16 else 3.0
    for reduction in ("mean", "sum", "none"):
        rule = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction}
        exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
        loss, expected = (
            fused_linear_cross_entropy(hidden, weight, target, accumulate=accumulate, **rule),
            truth(F.linear(*exact), target, **rule),
        )
        torch.testing.assert_close(loss.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
        by = scale / (1 if reduction == "mean" else rows)
        (loss.sum() * by).backward()
        (expected.sum() * by).backward()
        for one, other in zip(gradients(hidden, weight), exact, strict=True):
            distance = (one.double() - other.grad).norm() / other.grad.norm()
            assert distance < ROUNDING[dtype] / 2
            assert one.dtype == dtype


def peak(function):
    """Returns the bytes that a forward and backward take at most beyond what was there."""
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
    return found


@pytest.mark.parametrize(("dtype", "sums", "beyond"), [(BF16, "weight", 0), (FP16, "weight", 0), (BF16, "fp32", 1)])
def test_memory_is_the_weights_gradient_and_a_chunk(dtype, sums, beyond, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 2**24)
    hidden, weight, target = sample(4096, 65536, 1024, dtype)
    own, logits = weight.nbytes, 4096 * 65536 * 2

    def ours():
        loss = fused_linear_cross_entropy(hidden, weight, target, accumulate=sums)
        (loss * 3).backward()
        gradients(hidden, weight)

    def stored():
        F.cross_entropy(F.linear(hidden, weight), target).backward()
        gradients(hidden, weight)

    chunk = logits / 8
    assert peak(ours) < (1 + beyond) * own + 1.1 * chunk + 3 * hidden.nbytes + 2**23
    assert peak(stored) > own + 2 * logits


@pytest.mark.parametrize(("dtype", "reduction"), [(BF16, "mean"), (BF16, "none"), (FP16, "mean")])
def test_a_graph_replays_with_new_values(dtype, reduction, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 2**20)
    hidden, weight, target = sample(512, 5000, 64, dtype)

    def step():
        loss = fused_linear_cross_entropy(hidden, weight, target, reduction=reduction)
        (loss.sum() * 3).backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            gradients(hidden, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.copy_(hidden.flip(0))
        target.copy_(target.flip(0))
        weight.mul_(0.5)
    graph.replay()
    found = [captured.clone(), *(one.clone() for one in gradients(hidden, weight))]
    expected = [step().detach(), *gradients(hidden, weight)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_host_never_waits(dtype, reduction):
    hidden, weight, target = sample(512, 5000, 64, dtype)
    target[7] = 5000
    for debug in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(debug)
        try:
            for sums in ("weight", "fp32"):
                loss = fused_linear_cross_entropy(hidden, weight, target, reduction=reduction, accumulate=sums)
                loss.sum().backward(retain_graph=True)
                loss.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan().any()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("sums", ["weight", "fp32"])
def test_autocast(dtype, sums):
    hidden, weight, target = sample(512, 5000, 64, FP32)
    with torch.autocast("cuda", dtype=dtype):
        loss = fused_linear_cross_entropy(hidden, weight, target, accumulate=sums)
        logits = F.linear(hidden, weight)
    expected = F.cross_entropy(logits.float(), target)  # under autocast torch rounds the logarithms to half precision
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    (loss * 65536).backward()
    found = gradients(hidden, weight)
    (expected * 65536).backward()
    for one, other in zip(found, gradients(hidden, weight), strict=True):
        assert one.dtype == FP32
        assert (one - other).norm() < ROUNDING[dtype] / 2 * other.norm()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("dtype", "reduction"), [(BF16, "mean"), (FP16, "mean"), (BF16, "none")])
def test_compiles_whole(dtype, reduction, dynamic):
    torch._dynamo.reset()
    hidden, weight, target = sample(512, 5000, 64, dtype)

    def loss_of(one, head):
        return (fused_linear_cross_entropy(one * 2, head, target, reduction=reduction) * 3).mean()

    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, dynamic=dynamic)):
        loss = function(hidden, weight)
        loss.backward()
        found.append((loss.detach(), *gradients(hidden, weight)))
    torch.testing.assert_close(*found, rtol=ROUNDING[dtype], atol=1e-5)


def test_compiled_it_takes_at_most_one_more_gradient():
    """That of the forward, multiplied by the upstream one: eager code does it in its own memory."""
    torch._dynamo.reset()
    hidden, weight, target = sample(2048, 65536, 1024)
    compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True)

    def step(function):
        (function(hidden, weight, target) * 3).backward()
        gradients(hidden, weight)

    ours, theirs = peak(lambda: step(fused_linear_cross_entropy)), peak(lambda: step(compiled))
    assert theirs < ours + 1.2 * weight.nbytes
