"""Cross-entropy of hidden states and a head's weight: against float64 and stored logits, in every dtype, reduction and level."""

from __future__ import annotations

import contextlib
import importlib.util
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops import linear_cross_entropy
from fabricamp.ops.linear_cross_entropy import fused_linear_cross_entropy, linear_cross_entropy_reference
from tests.cuda_on_cpu.compiler import in_pairs, one_order, references
from tests.ops.losses import DTYPES, RULES, truth

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDING = {FP32: 2e-6, FP16: 2e-3, BF16: 1.6e-2}
REDUCTIONS = ["mean", "sum", "none"]
many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 1024)
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 2)
    monkeypatch.setattr(linear_cross_entropy, "_FIRST_PIECE", 8)


class Case:
    """Leaves in a dtype: hidden states, a head's weight and bias; a fifth of the targets is ignored."""

    def __init__(self, device, *lead, classes=37, width=16, dtype=FP32, ignored=0.2, seed=0, bias=True):
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape, scale=1.0):
            values = torch.randn(shape, generator=generator) * scale
            return values.to(device, dtype).requires_grad_()

        self.hidden, self.weight = leaf(*lead, width), leaf(classes, width, scale=0.4)
        self.bias = leaf(classes) if bias else None
        target = torch.randint(0, classes, lead, generator=generator)
        self.target = target.masked_fill(torch.rand(lead, generator=generator) < ignored, -100).to(device)

    @property
    def leaves(self):
        return [one for one in (self.hidden, self.weight, self.bias) if one is not None]

    def loss(self, **rule):
        return fused_linear_cross_entropy(self.hidden, self.weight, self.target, self.bias, **rule)

    def exact(self, **rule):
        """The same leaves in float64, and their loss."""
        wide = [one.detach().double().requires_grad_() for one in self.leaves]
        return wide, truth(F.linear(*wide), self.target, **rule)

    def gradients(self):
        found = [one.grad for one in self.leaves]
        for one in self.leaves:
            one.grad = None
        return found


def assert_close(found, expected, dtype, factor=1.0):
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == dtype
        size = exact.abs().max().item() if exact.numel() else 0.0
        # 1e-6: a probability of about 1 less 1 leaves two roundings of 1.2e-7, times hidden states of up to 4.
        torch.testing.assert_close(
            one.double(), exact, rtol=ROUNDING[dtype], atol=(ROUNDING[dtype] * size + 1e-6) * factor, equal_nan=True
        )


def assert_equals_float64(case, upstream=1.0, **rule):
    accumulate = rule.pop("accumulate", "weight")
    wide, expected = case.exact(**rule)
    loss = case.loss(accumulate=accumulate, **rule)
    assert loss.dtype == FP32
    dtype = case.weight.dtype
    torch.testing.assert_close(loss.double(), expected, rtol=ROUNDING[dtype], atol=20 * ROUNDING[dtype], equal_nan=True)
    weights = torch.rand(loss.shape, generator=torch.Generator().manual_seed(1)).to(loss) + 0.5
    (loss * weights * upstream).sum().backward()
    (expected * weights.double() * upstream).sum().backward()
    assert_close(case.gradients(), [one.grad for one in wide], dtype)


@many
@given(
    st.integers(0, 40), st.integers(1, 60), st.integers(1, 24), st.sampled_from(DTYPES),
    st.floats(0, 1), st.sampled_from([0, 1e-3, 0.1]), st.sampled_from([0.0, 2.0, 30.0]), st.sampled_from(REDUCTIONS), st.booleans(),
    st.sampled_from(["weight", "fp32"]), st.integers(0, 99),
)  # fmt: skip
def test_equals_float64(
    kernel_device, rows, classes, width, dtype, smoothing, z_loss, softcap, reduction, bias, sums, seed
):
    case = Case(kernel_device, rows, classes=classes, width=width, dtype=dtype, seed=seed, bias=bias)
    rule = {
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "reduction": reduction,
        "accumulate": sums,
    }
    assert_equals_float64(case, **rule)


@in_pairs("dtype, reduction, upstream, sums", DTYPES, REDUCTIONS, [1.0, 3.0, -0.37], ["weight", "fp32"])
def test_several_chunks_and_upstream_gradients(kernel_device, dtype, reduction, upstream, sums):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    assert_equals_float64(case, upstream, reduction=reduction, label_smoothing=0.1, z_loss=0.01, accumulate=sums)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_no_kernels_run(dtype, rule):
    assert_equals_float64(Case("cpu", 5, 30, dtype=dtype), **rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_is_as_near_to_float64_as_stored_logits(dtype, reduction):
    """As torch's loss of stored logits in the products' dtype."""
    case = Case("cpu", 400, classes=300, width=64, dtype=dtype)
    wide, expected = case.exact(reduction=reduction)
    expected.sum().backward()
    exact = [one.grad for one in wide]

    def distances():
        pairs = zip(case.gradients(), exact, strict=True)
        return torch.stack([(one.double() - other).norm() / other.norm() for one, other in pairs])

    F.cross_entropy(F.linear(*case.leaves).float(), case.target, reduction=reduction).sum().backward()
    theirs = distances()
    case.loss(reduction=reduction).sum().backward()
    # A half sum over the eight chunks is rounded eight times; one in fp32 is rounded once.
    assert (distances() < 2 * theirs + 1e-7).all()
    case.loss(reduction=reduction, accumulate="fp32").sum().backward()
    assert (distances() < 1.1 * theirs + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@one_order
def test_the_losses_of_the_chunks_are_added_up_in_fp32(kernel_device, reduction, dtype):
    """In bf16 the sum of 3,000 losses would be 0.4 % away, and more where rows are added one by one."""
    case = Case(kernel_device, 3000, classes=50, dtype=dtype)
    expected = F.cross_entropy(F.linear(*case.leaves).double(), case.target, reduction=reduction)
    torch.testing.assert_close(case.loss(reduction=reduction).double(), expected, rtol=5e-5, atol=0)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torchs_in_fp32(reduction, smoothing):
    case = Case("cpu", 60)
    rule = {"reduction": reduction, "label_smoothing": smoothing}
    case.loss(**rule).backward()
    found = case.gradients()
    for options in (None,) if smoothing else (None, nn.LinearCrossEntropyOptions()):  # its chunks take none
        loss = F.linear_cross_entropy(
            case.hidden, case.weight, case.target, linear_bias=case.bias, options=options, **rule
        )
        torch.testing.assert_close(case.loss(**rule), loss)
        loss.backward()
        torch.testing.assert_close(found, case.gradients(), rtol=1e-4, atol=1e-5)


# Class weights


def weights_of(case, dtype=FP32):
    weights = torch.rand(len(case.weight), generator=torch.Generator().manual_seed(3)) * 2
    weights[1] = 0
    return weights.to(case.weight.device, dtype)


@in_pairs(
    "dtype, reduction, upstream, sums, z_loss, runs",
    DTYPES,
    REDUCTIONS,
    [1.0, -0.37],
    ["weight", "fp32"],
    [0, 0.01],
    ["kernel", "torch"],
)
def test_class_weights(kernel_device, dtype, reduction, upstream, sums, z_loss, runs):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    rule = {
        "class_weight": weights_of(case),
        "reduction": reduction,
        "z_loss": z_loss,
        "softcap": 9.0,
        "accumulate": sums,
    }
    assert (case.target == 1).any()  # a class without weight
    with references(kernel_device) if runs == "torch" else contextlib.nullcontext():
        assert_equals_float64(case, upstream, **rule)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_class_weights_are_torchs(kernel_device, reduction):
    """Rows of one class weigh what they weigh in torch's loss, whose means divide by the weights."""
    case = Case(kernel_device, 60, ignored=0.3)
    weights = weights_of(case)
    loss = case.loss(class_weight=weights, reduction=reduction)
    loss.sum().backward()
    found = case.gradients()
    expected = F.cross_entropy(F.linear(*case.leaves), case.target, weights, reduction=reduction)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, case.gradients(), rtol=1e-4, atol=1e-5)


@in_pairs("reduction, dtype, weights", REDUCTIONS, [FP32, FP16], [FP32, BF16])
def test_class_weights_compiled_twice_differentiated_and_in_batches(kernel_device, reduction, dtype, weights):
    torch._dynamo.reset()
    case = Case(kernel_device, 5, 30, dtype=dtype)
    rule = {"class_weight": weights_of(case, weights), "reduction": reduction}
    found = []
    for function in (
        fused_linear_cross_entropy,
        torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager"),
    ):
        loss = function(case.hidden, case.weight, case.target, case.bias, **rule)
        loss.sum().backward()
        found.append((loss.detach(), *case.gradients()))
    torch.testing.assert_close(*found, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    wide, expected = case.exact(**rule)
    upstream = torch.rand(3, *expected.shape, device=kernel_device)
    batches = torch.autograd.grad(case.loss(**rule), case.leaves, upstream, is_grads_batched=True)
    assert_close(
        batches,
        torch.autograd.grad(expected, wide, upstream.double(), is_grads_batched=True, retain_graph=True),
        dtype,
    )
    loss = case.loss(**rule).sum()
    gradients = torch.autograd.grad(loss, case.leaves, create_graph=True)
    assert_close(gradients, torch.autograd.grad(expected.sum(), wide), dtype)
    with pytest.raises(ConfigError, match="no second derivative"):
        gradients[0].sum().backward()


def test_class_weights_of_the_reference_and_in_fp64():
    case = Case("cpu", 4, classes=5, width=3, dtype=FP64)
    weights = weights_of(case)
    rule = {"class_weight": weights, "z_loss": 0.1, "softcap": 2.0}

    def loss(hidden, weight, bias):
        return linear_cross_entropy_reference(hidden, weight, case.target, bias, **rule)

    assert torch.autograd.gradcheck(loss, case.leaves)
    for reduction in REDUCTIONS:
        torch.testing.assert_close(
            case.loss(reduction=reduction, **rule), case.exact(reduction=reduction, **rule)[1], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_class_weights_where_nothing_counts_and_where_a_target_names_no_class(kernel_device, reduction):
    case = Case(kernel_device, 40, ignored=0)
    weights = weights_of(case)
    case.target[31] = 37
    if reduction == "none":
        losses = case.loss(reduction="none", class_weight=weights)
        losses.sum().backward()
        assert losses.isnan().nonzero().tolist() == [[31]]
        assert case.gradients()[0].isnan().any(1).nonzero().tolist() == [[31]]
    case.target.fill_(-100)
    loss = case.loss(reduction=reduction, class_weight=weights)
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    loss.sum().backward()
    assert all((one == 0).all() for one in case.gradients())


@one_order
def test_at_most_eight_chunks(kernel_device, monkeypatch):
    case = Case(kernel_device, 600, classes=100)
    sizes = []
    forward = linear_cross_entropy.cross_entropy_forward
    monkeypatch.setattr(
        linear_cross_entropy, "cross_entropy_forward", lambda *given: sizes.append(len(given[0])) or forward(*given)
    )
    case.loss()
    assert sizes == [76] * 7 + [68]
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 2**20)
    sizes.clear()
    case.loss()
    assert sizes == [600]


# Half precision


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_the_gradient_of_a_rare_word_lives_by_the_loss_scale(kernel_device, reduction, scale):
    """Probability 1e-9 and less in fp16: zero at scale 1, as with stored logits, and right at the scale that training has."""
    rows, classes, width = 64, 50, 8
    hidden = torch.full((rows, width), 0.5, device=kernel_device, dtype=FP16).requires_grad_()
    weight = torch.zeros(classes, width, dtype=FP16)
    weight[7] = -4.0  # a logit of -16 where others are 0
    weight = weight.to(kernel_device).requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64, device=kernel_device)
    loss = fused_linear_cross_entropy(hidden, weight, target, reduction=reduction)
    (loss.sum() * scale / (rows if reduction != "mean" else 1)).backward()
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    (truth(F.linear(*exact), target) * scale).backward()
    stored = [one.detach().clone().requires_grad_() for one in (hidden, weight)]
    (
        ops.fused_cross_entropy(F.linear(*stored), target, reduction=reduction).sum()
        * scale
        / (rows if reduction != "mean" else 1)
    ).backward()
    torch.testing.assert_close(weight.grad[7], stored[1].grad[7], rtol=5e-3, atol=0)
    assert exact[1].grad[7].abs().max() / scale < 2e-9
    if scale == 1:
        assert (weight.grad[7] == 0).all()
    else:  # the smallest steps of fp16 in a row's logits are 1 % of them
        torch.testing.assert_close(weight.grad[7].double(), exact[1].grad[7], rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_a_half_weight_takes_fp32_hidden_states(kernel_device, dtype, reduction):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    case.loss(reduction=reduction).sum().backward()
    expected = case.gradients()
    case.hidden = case.hidden.detach().float().requires_grad_()
    case.loss(reduction=reduction).sum().backward()
    found = case.gradients()
    assert [one.dtype for one in found] == [FP32, dtype, dtype]
    assert torch.equal(found[0].to(dtype), expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("hidden", [FP32, FP16, BF16])
@one_order
def test_autocast(kernel_device, dtype, reduction, hidden):
    case = Case(kernel_device, 5, 30)
    case.hidden = case.hidden.detach().to(hidden).requires_grad_()
    with torch.autocast(kernel_device.type, dtype=dtype):
        loss = case.loss(reduction=reduction)
    loss.sum().mul(256).backward()
    found = case.gradients()
    with torch.autocast(kernel_device.type, dtype=dtype):
        logits = F.linear(*case.leaves)
    assert logits.dtype == dtype
    expected = F.cross_entropy(logits.float().flatten(0, 1), case.target.flatten(), reduction=reduction)
    torch.testing.assert_close(loss.flatten(), expected.flatten(), rtol=1e-5, atol=1e-4)
    expected.sum().mul(256).backward()
    for one, other, own in zip(found, case.gradients(), [hidden, FP32, FP32], strict=True):
        assert one.dtype == own
        size = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * size)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@one_order
def test_autocast_around_backward_changes_nothing(kernel_device, reduction):
    case = Case(kernel_device, 5, 30)
    case.loss(reduction=reduction).sum().backward()
    expected = case.gradients()
    loss = case.loss(reduction=reduction).sum()
    with torch.autocast(kernel_device.type, dtype=BF16):
        loss.backward()
    assert all(map(torch.equal, case.gradients(), expected))


# Autograd


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_two_backwards_of_a_kept_graph(kernel_device, reduction, dtype):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    loss = case.loss(reduction=reduction).sum() * 3
    loss.backward(retain_graph=True)
    first = case.gradients()
    copies = [one.clone() for one in first]
    loss.backward()
    second = case.gradients()
    for one, copy, other in zip(first, copies, second, strict=True):
        assert torch.equal(one, copy)
        # Gradients of the forward are rounded once more by the upstream gradient.
        size = copy.abs().max().item()
        torch.testing.assert_close(copy, other, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * size)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@one_order
def test_two_losses_accumulation_and_another_use_of_the_weight(kernel_device, dtype):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    other = case.target.flip(0)

    def total(leaves, loss_of):
        hidden, weight, bias = leaves
        embedded = F.embedding(case.target.clamp(0), weight) * hidden  # tied
        two = (
            loss_of(embedded, weight, case.target, bias) * 2
            + loss_of(hidden, weight, other, bias, reduction="sum") * 0.1
        )
        return two + weight.float().square().sum().to(two.dtype) * 0.01

    def exact_loss(hidden, weight, target, bias, **rule):
        return truth(F.linear(hidden, weight, bias), target, **rule)

    wide = [one.detach().double().requires_grad_() for one in case.leaves]
    for _ in range(2):
        total(case.leaves, fused_linear_cross_entropy).backward()
        total(wide, exact_loss).backward()
    assert_close(case.gradients(), [one.grad for one in wide], dtype, factor=3)


@one_order
def test_only_what_needs_a_gradient_gets_one(kernel_device):
    case = Case(kernel_device, 5, 30)
    case.loss().backward()
    expected = case.gradients()
    for number in range(7):
        needed = [bool(number & 1), bool(number & 2), bool(number & 4)]
        for one, wanted in zip(case.leaves, needed, strict=True):
            one.requires_grad_(wanted)
        loss = case.loss()
        assert loss.requires_grad is any(needed)
        if any(needed):
            loss.backward()
        for one, wanted, whole in zip(case.gradients(), needed, expected, strict=True):
            assert (one is not None) is wanted
            assert one is None or torch.equal(one, whole)


@one_order
def test_without_gradients_none_are_made(kernel_device, monkeypatch):
    case = Case(kernel_device, 5, 30)
    monkeypatch.setattr(linear_cross_entropy, "cross_entropy_backward", None)
    with torch.no_grad():
        loss = case.loss()
    assert loss.grad_fn is None
    torch.testing.assert_close(loss.double(), case.exact()[1].detach())


@one_order
def test_gradients_of_the_forward_are_handed_on_without_a_copy(kernel_device):
    case = Case(kernel_device, 40)
    loss = case.loss()
    made = loss.grad_fn.made
    addresses = [made.hidden.data_ptr(), made.weight.data_ptr()]
    del made
    loss.backward()
    assert [case.hidden.grad.data_ptr(), case.weight.grad.data_ptr()] == addresses
    assert loss.grad_fn.made is None


@one_order
def test_the_sums_in_fp32_are_narrowed_in_place(kernel_device):
    case = Case(kernel_device, 40, dtype=BF16)
    loss = case.loss(accumulate="fp32")
    wide = loss.grad_fn.made.weight
    assert wide.dtype == FP32
    values, address = wide.to(BF16), wide.data_ptr()
    del wide
    loss.backward()
    assert case.weight.grad.data_ptr() == address
    assert torch.equal(case.weight.grad, values)
    assert case.weight.grad.is_contiguous()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 1000])
def test_every_piece_is_narrowed_before_it_is_written_over(rows):
    wide = torch.randn(rows, 3)
    assert torch.equal(linear_cross_entropy._narrowed(wide.clone(), BF16), wide.to(BF16))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_checkpointing_and_saved_tensors_hooks(kernel_device, reduction, reentrant):
    case = Case(kernel_device, 5, 30)
    case.loss(reduction=reduction).sum().backward()
    expected = case.gradients()

    def loss_of(hidden):
        return fused_linear_cross_entropy(hidden, case.weight, case.target, case.bias, reduction=reduction)

    checkpoint(loss_of, case.hidden, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(case.gradients(), expected)
    with torch.autograd.graph.save_on_cpu():
        loss = case.loss(reduction=reduction)
    loss.sum().backward()
    torch.testing.assert_close(case.gradients(), expected)


@one_order
def test_a_weight_that_was_written_before_backward_is_told(kernel_device):
    case = Case(kernel_device, 5, 30)
    loss = case.loss()
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_a_second_derivative_is_refused_by_name(kernel_device, reduction):
    case = Case(kernel_device, 5, 30)
    loss = case.loss(reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, case.weight, create_graph=True)
    wide, expected = case.exact(reduction=reduction)
    assert_close([gradient], torch.autograd.grad(expected.sum(), wide[1]), FP32)
    with pytest.raises(ConfigError, match="fused_linear_cross_entropy has no second derivative .*_reference"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@one_order
def test_batches_of_gradients(kernel_device, reduction, dtype):
    case = Case(kernel_device, 6, dtype=dtype)
    upstream = torch.rand(3, *case.loss(reduction=reduction).shape, device=kernel_device)
    found = torch.autograd.grad(case.loss(reduction=reduction), case.leaves, upstream, is_grads_batched=True)
    wide, expected = case.exact(reduction=reduction)
    assert_close(found, torch.autograd.grad(expected, wide, upstream.double(), is_grads_batched=True), dtype)


def test_the_reference_can_be_differentiated_twice():
    case = Case("cpu", 4, classes=5, width=3, dtype=FP64)

    def loss(hidden, weight, bias):
        return linear_cross_entropy_reference(
            hidden, weight, case.target, bias, label_smoothing=0.1, z_loss=0.1, softcap=2.0
        )

    assert torch.autograd.gradcheck(loss, case.leaves)
    assert torch.autograd.gradgradcheck(loss, case.leaves)


def test_fp64_stores_its_logits():
    case = Case("cpu", 5, 30, dtype=FP64)
    wide, expected = case.exact(label_smoothing=0.1)
    loss = case.loss(label_smoothing=0.1)
    assert loss.dtype == FP64
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(case.gradients(), [one.grad for one in wide])


@one_order
def test_torch_func_stores_its_logits(kernel_device):
    case = Case(kernel_device, 6)
    case.loss().backward()
    expected = case.gradients()[1]
    bias = case.bias.detach()
    found = torch.func.grad(lambda one: fused_linear_cross_entropy(case.hidden.detach(), one, case.target, bias))(
        case.weight.detach()
    )
    torch.testing.assert_close(found, expected)


# Rows that do not count


@pytest.mark.parametrize("upstream", [1.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@one_order
def test_targets_that_are_all_ignored_give_zeros(kernel_device, reduction, dtype, upstream):
    case = Case(kernel_device, 5, 30, dtype=dtype)
    case.target.fill_(-100)
    loss = case.loss(reduction=reduction)
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    loss.backward(torch.full_like(loss, upstream))
    assert all((one == 0).all() for one in case.gradients())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@in_pairs("ignore_index, runs", [-100, 3], ["kernel", "torch"])
def test_nan_in_a_row_that_does_not_count_goes_nowhere(kernel_device, ignore_index, runs, reduction, dtype):
    case = Case(kernel_device, 40, dtype=dtype)
    case.target = case.target.masked_fill(case.target == -100, ignore_index)
    rule = {"reduction": reduction, "ignore_index": ignore_index}

    def gradients():
        loss = case.loss(**rule)
        loss.sum().backward()
        return [loss.detach(), *case.gradients()]

    def compared():
        clean = gradients()
        ignored = case.target == ignore_index
        with torch.no_grad():
            kept = case.hidden.clone()
            case.hidden[ignored] = math.nan
        broken = gradients()
        with torch.no_grad():
            case.hidden.copy_(kept)
        assert ignored.any()
        assert all(map(torch.equal, clean, broken))
        assert (broken[1][ignored] == 0).all()

    if runs == "kernel":
        compared()
    else:
        with references(kernel_device):
            compared()


@one_order
def test_a_target_that_names_no_class(kernel_device):
    case = Case(kernel_device, 40, ignored=0)
    case.target[31] = 37
    losses = case.loss(reduction="none")
    losses.sum().backward()
    assert losses.isnan().nonzero().tolist() == [[31]]
    assert case.hidden.grad.isnan().any(1).nonzero().tolist() == [[31]]
    words = r"target\[31\] is 37, but there are 37 classes: targets are 0 to 36"
    if kernel_device.type == "cpu":
        with references(kernel_device), pytest.raises(ConfigError, match=words):
            case.loss()


# Compilers and observers


@in_pairs("dtype, reduction, dynamic", DTYPES, REDUCTIONS, [False, True])
def test_compiles_whole(kernel_device, dtype, reduction, dynamic):
    torch._dynamo.reset()
    case = Case(kernel_device, 5, 30, dtype=dtype)

    def loss_of(*leaves):
        hidden, weight, bias = leaves
        made = fused_linear_cross_entropy(hidden * 2, weight, case.target, bias, reduction=reduction, z_loss=1e-3)
        return (made * 3).sum()

    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        loss = function(*case.leaves)
        loss.backward()
        found.append((loss.detach(), *case.gradients()))
    torch.testing.assert_close(*found, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_compiles_where_kernels_depend_on_what_is_installed(monkeypatch):
    """As on a GPU: the compiler cannot trace that question."""
    torch._dynamo.reset()
    case = Case("cpu", 12)
    monkeypatch.setattr(linear_cross_entropy, "runs_kernels", lambda device: importlib.util.find_spec("cupy") is None)
    compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.hidden, case.weight, case.target, case.bias), case.loss())


@pytest.mark.parametrize("dtype", [FP16, BF16])
@one_order
def test_compiles_under_autocast(kernel_device, dtype):
    torch._dynamo.reset()
    case = Case(kernel_device, 5, 30)

    def loss_of(*leaves):
        hidden, weight, bias = leaves
        with torch.autocast(kernel_device.type, dtype=dtype):
            return fused_linear_cross_entropy(hidden, weight, case.target, bias, accumulate="fp32")

    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        loss = function(*case.leaves)
        loss.backward()
        found.append((loss.detach(), *case.gradients()))
    torch.testing.assert_close(*found)


@in_pairs("reduction, dtype, bias", ["mean", "none"], [FP32, FP16], [True, False])
def test_the_registered_operations_are_well_formed(kernel_device, reduction, dtype, bias):
    case = Case(kernel_device, 12, dtype=dtype, bias=bias)
    forward = torch.ops.fabricamp.linear_cross_entropy.default
    backward = torch.ops.fabricamp.linear_cross_entropy_backward.default
    way = (0.1, -100, reduction, 0.01, 5.0, dtype, FP32, [True, True, bias])
    factors = None if bias else torch.rand(12, device=kernel_device)
    given = (case.hidden, case.weight, case.bias, case.target, factors)
    torch.library.opcheck(forward, (*given, *way))
    loss, statistics, *_ = forward(*given, *way)
    given = [one if one is None else one.detach() for one in given]
    torch.library.opcheck(backward, (torch.ones_like(loss), *given, statistics.detach(), *way))


@one_order
def test_exports(kernel_device):
    case = Case(kernel_device, 12)

    class Loss(nn.Module):
        def forward(self, hidden, weight, target):
            return fused_linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)

    given = (case.hidden.detach(), case.weight.detach(), case.target)
    exported = torch.export.export(Loss(), given)
    assert any("fabricamp.linear_cross_entropy" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(*given), Loss()(*given))


def test_tensors_without_data():
    case = Case("meta", 12)
    loss = case.loss()
    assert loss.shape == ()
    assert loss.is_meta


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "means"}, "did you mean 'mean'"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5 .* from 0 to 1"),
        ({"z_loss": math.nan}, "z_loss=nan"),
        ({"class_weight": torch.ones(6)}, r"class_weight is torch.float32 of shape \(6,\); give a floating tensor of shape \(7,\)"),
        ({"class_weight": torch.ones(7, dtype=torch.int64)}, "class_weight is torch.int64"),
        ({"class_weight": torch.ones(7, requires_grad=True)}, "class_weight is one that requires grad"),
        ({"class_weight": torch.ones(7, device="meta")}, "class_weight is on meta and targets on cpu"),
        ({"class_weight": torch.ones(7), "label_smoothing": 0.1}, "class_weight with label_smoothing=0.1 is not offered"),
        ({"softcap": -1.0}, r"softcap=-1.0 .* a positive number, or 0 for none"),
        ({"accumulate": "fp16"}, "accumulate='fp16' is not known.*'weight', 'fp32'"),
        ({"target": torch.zeros(3)}, r"targets of torch.float32: .* int64 or int32"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"hidden of shape \(3, 5\) and targets of shape \(4,\): the targets'"),
        ({"hidden": torch.zeros(3, 6)}, r"hidden of shape \(3, 6\) and weight of shape \(7, 5\): the weight is \(classes, width\)"),
        ({"hidden": torch.zeros(())}, r"hidden of shape \(\) and weight"),
        ({"weight": torch.zeros(0, 5)}, r"weight of shape \(0, 5\)"),
        ({"bias": torch.zeros(6)}, r"bias of shape \(6,\): the weight has 7 classes"),
        ({"bias": torch.zeros(7, dtype=FP16)}, r"bias of torch.float16 and weight of torch.float32"),
        ({"hidden": torch.zeros(3, 5, dtype=torch.int64)}, "hidden of torch.int64: give a floating dtype"),
        ({"hidden": torch.zeros(3, 5, device="meta")}, "hidden is on meta and targets on cpu"),
        ({"hidden": torch.zeros(3, 5, dtype=BF16)}, "hidden of torch.bfloat16 and weight of torch.float32: give both in one"),
        ({"weight": torch.zeros(7, 5, dtype=FP64)}, "hidden of torch.float32 and weight of torch.float64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, message):
    operands = {"hidden": torch.zeros(3, 5), "weight": torch.zeros(7, 5), "target": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=message):
        fused_linear_cross_entropy(**(operands | arguments))
