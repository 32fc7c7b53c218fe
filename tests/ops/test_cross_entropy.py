"""Cross-entropy by its kernels against float64: every dtype, width, layout and reduction, in place too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch
from tests.cuda_on_cpu.compiler import references
from tests.ops.losses import DTYPES, ROUNDING, RULES, sample, truth

many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _kernels_wherever_they_run():
    with dispatch.always("cupy"):
        yield


def assert_equals_truth(logits, target, *, in_place=False, layout=lambda one: one, **rule):
    """Compares loss and gradient with float64; ``layout`` converts dense logits to the memory layout under test."""
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = ops.fused_cross_entropy(layout(leaf * 1), target, in_place=in_place, **rule)
    expected = truth(layout(exact), target, **rule)
    assert loss.dtype == torch.float32
    cap = rule.get("softcap", 0)  # the kernel caps to 2e-7 of the cap
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6 + 1e-6 * cap, equal_nan=True)
    weights = torch.rand(loss.shape, generator=torch.Generator().manual_seed(1)).to(loss)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    if target.numel():
        size = exact.grad.abs().max().item()
        # At the label the gradient is about p - 1: if p is nearly 1, its absolute error is the fp32 rounding of p times its factor.
        rounding, left = ROUNDING[logits.dtype], 1e-7 * (1 + 40 * rule.get("z_loss", 0)) * (1 + cap)
        smallest = 6e-8 if logits.dtype == torch.float16 else 0
        torch.testing.assert_close(
            leaf.grad.double(), exact.grad, rtol=rounding, atol=rounding * size * 0.1 + left + smallest, equal_nan=True
        )
    assert leaf.grad.dtype == logits.dtype


@many
@given(
    st.integers(1, 20), st.integers(1, 300), st.sampled_from(DTYPES), st.floats(0, 1),
    st.sampled_from([0, 1e-3, 1.0]), st.sampled_from([0.0, 2.0, 30.0]),
    st.sampled_from(["mean", "sum", "none"]), st.sampled_from([-100, -1, 0]), st.integers(0, 99),
)  # fmt: skip
def test_equals_float64(kernel_device, rows, classes, dtype, smoothing, z_loss, softcap, reduction, ignore_index, seed):
    logits, target = sample(kernel_device, rows, classes, dtype=dtype, seed=seed)
    target[target == -100] = ignore_index
    rule = {
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "reduction": reduction,
        "ignore_index": ignore_index,
    }
    assert_equals_truth(logits, target, **rule)


WIDE = [
    (1025, torch.float32),
    (1025, torch.float16),
    (2047, torch.bfloat16),
    (2063, torch.float32),
    (9001, torch.bfloat16),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("classes", "dtype"), WIDE)
def test_wide_rows_by_all_numbers_of_threads(kernel_device, classes, dtype, rule):
    logits, target = sample(kernel_device, 3, classes, dtype=dtype)
    target[0], target[1] = classes - 1, 0
    assert_equals_truth(logits, target, **rule)


@pytest.mark.parametrize("place", range(37))
def test_a_label_at_every_place_of_an_unaligned_row(kernel_device, place):
    logits, target = sample(kernel_device, 9, 37, dtype=torch.bfloat16, ignored=0)
    target[:] = place
    assert_equals_truth(logits, target, label_smoothing=0.1)
    assert_equals_truth(logits, target, in_place=True)


LAYOUTS = {
    "shifted": ((3, 5, 67), lambda one: one[:, :-1]),
    "every second row": ((12, 40), lambda one: one[::2]),
    "some columns": ((6, 80), lambda one: one[:, 3:70]),
    "transposed rows": ((3, 5, 48), lambda one: one.transpose(0, 1)),
    "unaligned memory": ((5 * 33 + 1,), lambda one: one[1:].view(5, 33)),
    "transposed": ((40, 6), lambda one: one.t()),
    "three strides": ((3, 4, 5, 24), lambda one: one[:, 1:3, ::2]),
    "two strides of three": ((3, 4, 5, 24), lambda one: one[:, ::2, ::2]),
    "a dimension of one": ((3, 1, 5, 24), lambda one: one[:, :, ::2]),
    "the same row": ((1, 50), lambda one: one.expand(7, 50)),
    "overlapping rows": ((60,), lambda one: one.unfold(0, 20, 3)),
    "one row": ((50,), lambda one: one),
    "no rows": ((0, 50), lambda one: one),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layouts(kernel_device, name, dtype, in_place):
    shape, layout = LAYOUTS[name]
    logits, _ = sample(kernel_device, *shape, dtype=dtype)
    _, target = sample(kernel_device, *layout(logits).shape, seed=3)
    for rule in ({}, {"reduction": "none", "label_smoothing": 0.1}):
        assert_equals_truth(logits, target, in_place=in_place, layout=layout, **rule)


@pytest.mark.parametrize("labels", [torch.int64, torch.int32])
def test_targets_of_both_dtypes_and_any_strides(kernel_device, labels):
    logits, target = sample(kernel_device, 4, 6, 40, labels=labels)
    assert_equals_truth(logits, target.t().contiguous().t())


@pytest.mark.parametrize("expand", [True, False])
def test_gradients_of_rows_in_any_strides(kernel_device, expand):
    logits, target = sample(kernel_device, 4, 6, 40)
    exact, leaf = logits.double().requires_grad_(), logits.requires_grad_()
    weights = (
        torch.rand((), device=kernel_device).expand(4, 6) if expand else torch.rand(6, 4, device=kernel_device).t()
    )
    ops.fused_cross_entropy(leaf, target, reduction="none").backward(weights)
    truth(exact, target, reduction="none").backward(weights.double())
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-6, atol=1e-7)


def test_rows_that_count_for_nothing_are_not_read(kernel_device):
    logits, _ = sample(kernel_device, 9, 33, dtype=torch.float16)
    logits[4] = math.nan
    target = torch.full((9,), 7, device=kernel_device)
    target[4] = 3
    leaf = logits.requires_grad_()
    loss = ops.fused_cross_entropy(leaf, target, ignore_index=3)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[4].count_nonzero() == 0
    assert ops.fused_cross_entropy(leaf, torch.full_like(target, 3), ignore_index=3).isnan()
    assert ops.fused_cross_entropy(leaf, torch.full_like(target, 3), ignore_index=3, reduction="sum") == 0


@pytest.mark.parametrize("width", [9, 1100])
def test_a_target_that_names_no_class_makes_its_row_nan(kernel_device, width):
    logits, target = sample(kernel_device, 5, width, ignored=0)
    target[1], target[3] = width, -1
    leaf = logits.requires_grad_()
    losses = ops.fused_cross_entropy(leaf, target, reduction="none", label_smoothing=0.1)
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, True, False, True, False]
    assert leaf.grad.isnan().all(-1).tolist() == losses.isnan().tolist()
    assert leaf.grad.isnan().any(-1).tolist() == losses.isnan().tolist()
    assert ops.fused_cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [20, 1100])
def test_large_masked_and_broken_logits(kernel_device, dtype, classes):
    logits, _ = sample(kernel_device, 8, classes, dtype=dtype)
    low = torch.finfo(dtype).min
    logits[0] += 1000
    logits[1, 3:] = -math.inf
    logits[2] = low
    logits[3, ::2] = low
    logits[4, 5] = math.inf
    logits[5, 5] = math.nan
    logits[6] = -math.inf
    logits[7, :] = 0
    target = torch.tensor([0, 1, 2, 3, 4, 6, 7, 1], device=kernel_device)
    exact, leaf = logits.double().requires_grad_(), logits.requires_grad_()
    losses, expected = ops.fused_cross_entropy(leaf, target, reduction="none"), truth(exact, target, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    losses.sum().backward()
    expected.sum().backward()
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rounding, atol=rounding, equal_nan=True)


def test_a_scaled_loss_keeps_half_gradients_alive(kernel_device):
    logits, target = sample(kernel_device, 64, 1500, dtype=torch.float16, ignored=0)
    leaf = logits.requires_grad_()
    (ops.fused_cross_entropy(leaf, target) * 2.0**16).backward()
    exact = logits.detach().double().requires_grad_()
    (truth(exact, target) * 2.0**16).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-3, atol=1e-6)


def test_two_runs_have_equal_bits(kernel_device):
    logits, target = sample(kernel_device, 40, 1300)
    runs = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        loss = ops.fused_cross_entropy(leaf, target, label_smoothing=0.1, z_loss=0.1)
        loss.backward()
        runs.append((loss, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


# In place


def test_in_place_the_gradient_takes_the_memory_of_the_logits(kernel_device):
    logits, target = sample(kernel_device, 6, 2000, dtype=torch.bfloat16)
    taken = []
    for in_place in (True, False):
        leaf = logits.clone().requires_grad_()
        given = leaf.view_as(leaf) * 1
        given.register_hook(lambda gradient: taken.append((gradient.data_ptr(), gradient.clone())))
        ops.fused_cross_entropy(given, target, in_place=in_place).backward()
        assert (taken[-1][0] == given.data_ptr()) is in_place
        assert given._version == int(in_place)
    assert torch.equal(taken[0][1], taken[1][1])


def test_in_place_leaves_what_is_between_the_rows(kernel_device):
    base, target = sample(kernel_device, 5, 40)
    given = (base.requires_grad_() * 1)[:, 3:33]
    whole = given._base.detach()
    before = whole.clone()
    ops.fused_cross_entropy(given, target.clamp(max=20), in_place=True).backward()
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 33:], before[:, 33:])
    assert not torch.equal(whole[:, 3:33], before[:, 3:33])


def test_in_place_torch_refuses_what_would_need_the_logits(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    given = logits.requires_grad_() * 1
    loss = ops.fused_cross_entropy(given, target, in_place=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    given = logits.exp()  # the backward of exp needs its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ops.fused_cross_entropy(given, target, in_place=True).backward()


def test_in_place_over_a_leaf_is_refused_everywhere(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    with pytest.raises(ConfigError, match="in_place=True .* leaf"):
        ops.fused_cross_entropy(logits.requires_grad_(), target, in_place=True)
    with references(kernel_device), pytest.raises(ConfigError, match="in_place=True .* leaf"):
        ops.fused_cross_entropy(logits, target, in_place=True)
    with torch.no_grad():
        assert ops.fused_cross_entropy(logits.detach(), target, in_place=True).isfinite()
        assert ops.fused_cross_entropy(logits.detach()[1:], target[1:], in_place=True).isfinite()


def test_in_place_over_a_view_of_a_leaf_is_refused(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    leaf = logits.view(2, 90).requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises(ConfigError, match="in_place=True .* a leaf that requires grad, or a view of one"):
        ops.fused_cross_entropy(leaf.view(6, 30), target, in_place=True).backward()
    assert torch.equal(leaf, before)
    ops.fused_cross_entropy((leaf * 1).view(6, 30), target, in_place=True).backward()
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("rows", [4096, 4097, 20_000])
def test_many_narrow_rows_are_added_up_by_several_blocks(kernel_device, rows):
    logits, target = sample(kernel_device, rows, 3)
    assert_equals_truth(logits, target)
