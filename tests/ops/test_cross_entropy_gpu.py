"""Cross-entropy on a GPU: all numbers of threads in every dtype, graphs, memory, no wait, the compiler, large tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.ops import dispatch
from tests.ops.losses import DTYPES, ROUNDING, RULES, sample, truth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def _kernels_for_all_widths():
    with dispatch.always("cupy"):
        yield


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1000, 4999, 32000, 50257, 50304, 262144 + 3])
def test_vocabularies(classes, dtype, in_place):
    logits, target = sample("cuda", 70, classes, dtype=dtype)
    for rule in RULES:
        leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        loss, expected = (
            ops.fused_cross_entropy(leaf * 1, target, in_place=in_place, **rule),
            truth(exact, target, **rule),
        )
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        (loss.sum() * 1000).backward()
        (expected.sum() * 1000).backward()
        rounding, size = ROUNDING[dtype] * 5, exact.grad.abs().max().item()
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rounding, atol=1e-6 * size)


def test_a_graph_replays_with_new_logits():
    logits, target = sample("cuda", 300, 5000, dtype=torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled here, outside the graph
        for _ in range(3):
            leaf.grad = None
            ops.fused_cross_entropy(leaf * 1, target, label_smoothing=0.1).backward()
    torch.cuda.current_stream().wait_stream(side)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = ops.fused_cross_entropy(leaf * 1, target, label_smoothing=0.1)
        loss.backward()
    with torch.no_grad():
        leaf.copy_(logits.flip(0))
        target.copy_(target.flip(0))
    graph.replay()
    exact = logits.flip(0).double().requires_grad_()
    expected = truth(exact, target, label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-2, atol=1e-7)


def test_the_host_never_waits():
    logits, target = sample("cuda", 300, 5000, dtype=torch.float16)
    leaf = logits.requires_grad_()
    ops.fused_cross_entropy(leaf, target).backward()
    target[0] = 5000
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = ops.fused_cross_entropy(leaf * 1, target, in_place=True)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan()


def peak(function, *shape):
    """Returns the peak memory of a forward and backward, in multiples of the logits."""
    made = torch.randn(*shape, device="cuda").to(torch.bfloat16).requires_grad_()
    target = torch.randint(0, shape[-1], shape[:-1], device="cuda")
    for _ in range(2):
        logits = torch.nn.functional.threshold(made, -1e30, 0)  # an operation that keeps its input, not its result
        # Frees memory of earlier tests and rounds before the measurement: autograd's thread frees a backward's memory at the next.
        gc.collect()
        torch.ones((), device="cuda", requires_grad=True).mul(1).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - logits.numel() * 2
        loss = function(logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
        found = (torch.cuda.max_memory_allocated() - before) / (logits.numel() * 2)
        del logits, loss, gradient
    return found


def test_memory_is_half_of_torchs_and_a_quarter_in_place():
    shape = (2048, 50304)
    theirs = peak(F.cross_entropy, *shape)
    ours = peak(ops.fused_cross_entropy, *shape)
    over = peak(lambda logits, target: ops.fused_cross_entropy(logits, target, in_place=True), *shape)
    assert ours < 0.51 * theirs
    assert over < 0.26 * theirs


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_whole(dynamic):
    torch._dynamo.reset()
    logits, target = sample("cuda", 300, 5000, dtype=torch.bfloat16)

    def loss_of(one):
        return ops.fused_cross_entropy(one * 2, target, label_smoothing=0.1, z_loss=1e-3)

    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, dynamic=dynamic)):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*found)


def test_runs_on_the_stream_and_card_of_its_tensors():
    logits, target = sample("cuda", 300, 5000)
    expected = truth(logits, target)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(2e7))
        late = logits * 1
        loss = ops.fused_cross_entropy(late, target)
    side.synchronize()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.gpu_memory(gib=24)  # logits, their copy and gradient, and the temporaries of isfinite
@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_two_to_the_31_elements(in_place):
    rows, classes = 43008, 50257  # 2.16e9 logits: 4.3 GB, and unaligned rows
    generator = torch.Generator("cuda").manual_seed(0)
    made = torch.empty(rows, classes, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    target = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    target[5] = -100
    ends = torch.tensor([0, 5, rows // 2, rows - 2, rows - 1], device="cuda")
    exact = made[ends].double().requires_grad_()
    expected = truth(exact, target[ends], reduction="none")
    expected.sum().backward()
    leaf = made.requires_grad_()
    given = torch.nn.functional.threshold(leaf, -1e30, 0)
    losses = ops.fused_cross_entropy(given, target, reduction="none", in_place=in_place)
    (gradient,) = torch.autograd.grad(losses.sum(), given)
    torch.testing.assert_close(losses[ends].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[ends].double(), exact.grad, rtol=1e-2, atol=1e-8)
    assert gradient.isfinite().all()
