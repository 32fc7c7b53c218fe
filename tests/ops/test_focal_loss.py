"""Focal loss by its kernel and by torch, against its formula in float64."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.focal_loss import focal_loss_reference
from tests.cuda_on_cpu.compiler import references

many = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROUNDING = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def truth(logits, targets, positives, real, alpha, gamma, smoothing=0.0):
    """Returns the formula of the paper, summed over the anchors that count."""
    rows = logits.double().reshape(-1, logits.shape[-1])[targets.reshape(-1) != -2, :real]
    labels = targets[targets != -2].reshape(-1)
    hot = F.one_hot(labels.where(labels >= 0, real), real + 1)[:, :real].double()
    entropy = F.binary_cross_entropy_with_logits(rows, hot * (1 - smoothing) + smoothing / 2, reduction="none")
    p = rows.sigmoid()
    weight = hot * alpha * (1 - p) ** gamma + (1 - hot) * (1 - alpha) * p**gamma
    return (weight * entropy).sum() / positives.double().item()


def sample(device, rows, classes, real, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*rows, classes, generator=generator) * 3).to(dtype)
    targets = torch.randint(-2, real, rows, generator=generator)
    return logits.to(device), targets.to(device), torch.tensor([3.5], device=device)


@many
@given(
    st.integers(1, 4), st.integers(1, 37), st.integers(0, 3), st.sampled_from(list(ROUNDING)), st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 2.0, 2.5]), st.sampled_from([0.0, 0.2]), st.integers(0, 99),
)  # fmt: skip
def test_equals_the_formula_in_float64(kernel_device, rows, real, padding, dtype, alpha, gamma, smoothing, seed):
    logits, targets, positives = sample(kernel_device, (2, rows), real + padding, real, dtype, seed)
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    expected = truth(exact, targets, positives, real, alpha, gamma, smoothing)
    loss = ops.focal_loss(leaf, targets, positives, real, alpha, gamma, smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    (loss * 64).backward()
    if expected.requires_grad:
        (expected * 64).backward()
        rounding = ROUNDING[dtype]
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rounding, atol=rounding)
    assert leaf.grad[..., real:].count_nonzero() == 0
    with references(kernel_device):
        torch.testing.assert_close(
            ops.focal_loss(logits, targets, positives, real, alpha, gamma, smoothing), loss.detach()
        )


def test_more_rows_than_one_pass_of_the_grid_takes(kernel_device, monkeypatch):
    monkeypatch.setattr(sys.modules[focal_loss_reference.__module__], "_MOST_BLOCKS", 2)
    logits, targets, positives = sample(kernel_device, (77,), 9, 9)
    runs = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        loss = ops.focal_loss(leaf, targets, positives, 9, 0.25, 2.0)
        loss.backward()
        runs.append((loss, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    with references(kernel_device):
        leaf = logits.clone().requires_grad_()
        loss = ops.focal_loss(leaf, targets, positives, 9, 0.25, 2.0)
        loss.backward()
    torch.testing.assert_close((loss, leaf.grad), runs[0])


def test_large_logits_stay_finite(kernel_device):
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0], [math.inf, 0.0]], device=kernel_device)
    targets, one = torch.tensor([0, 0, -2], device=kernel_device), torch.ones(1, device=kernel_device)
    leaf, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    loss, expected = (ops.focal_loss(x, targets, one, 2, 0.25, 2.0) for x in (leaf, exact))
    torch.testing.assert_close(loss.double(), expected)
    loss.backward()
    assert leaf.grad.isfinite().all()
    assert loss.item() == pytest.approx(200 * 0.25 + 200 * 0.75)


def test_any_layout_and_no_rows(kernel_device):
    logits, targets, positives = sample(kernel_device, (6, 5), 8, 7)
    dense = ops.focal_loss(logits, targets, positives, 7, 0.25, 2.0)
    turned = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(ops.focal_loss(turned, targets.t().contiguous().t(), positives, 7, 0.25, 2.0), dense)
    leaf = logits[:0].clone().requires_grad_()
    loss = ops.focal_loss(leaf, targets[:0], positives, 7, 0.25, 2.0)
    loss.backward()
    assert loss == 0
    assert leaf.grad.shape == (0, 5, 8)


def test_it_can_be_differentiated_twice(kernel_device):
    logits, targets, positives = sample(kernel_device, (6,), 8, 7)
    seconds = []
    for function, leaf in ((ops.focal_loss, logits.clone()), (focal_loss_reference, logits.clone())):
        leaf.requires_grad_()
        (first,) = torch.autograd.grad(function(leaf, targets, positives, 7, 0.25, 2.0), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*seconds)


def test_compiles_whole(kernel_device):
    torch._dynamo.reset()
    logits, targets, positives = sample(kernel_device, (6,), 8, 7)

    def loss_of(one):
        return ops.focal_loss(one * 2, targets, positives, 7, 0.25, 2.0)

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits), loss_of(logits))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"shape \(3, 5\) and targets of shape \(4,\)"),
        ({"classes": 6}, "num_real_classes=6 of logits for 5 classes: give 1 to 5"),
        ({"targets": torch.zeros(3)}, "targets of torch.float32"),
        ({"positives": torch.ones(2)}, r"num_positives_sum of shape \(2,\)"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    kept = {"targets": torch.zeros(3, dtype=torch.int64), "positives": torch.ones(1), "classes": 5} | arguments
    with pytest.raises(ConfigError, match=message):
        ops.focal_loss(torch.zeros(3, 5), *kept.values(), 0.25, 2.0)
