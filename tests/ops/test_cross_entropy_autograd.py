"""Cross-entropy under autograd, autocast and the compiler, its torch operations without kernels, and refused arguments."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch
from fabricamp.ops.cross_entropy import (
    CrossEntropyRule,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_reference,
)
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.losses import DTYPES, ROUNDING, RULES, sample, truth


class Elsewhere(torch.Tensor):
    """A tensor subclass: kernels must not assume that it has memory of its own."""


many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _kernels_wherever_they_run():
    with dispatch.always("cupy"):
        yield


def test_nothing_stays_alive_without_gradients(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    gc.collect()
    gc.disable()
    try:
        for grad in (False, True):
            given = logits.clone().requires_grad_() * 1
            gone = weakref.ref(given)
            with torch.set_grad_enabled(grad):
                loss = ops.fused_cross_entropy(given, target)
            assert (loss.grad_fn is None) is not grad
            if grad:
                loss.backward()
                del loss  # the loss holds the graph, and the graph holds the logits
            del given
            assert gone() is None
    finally:
        gc.enable()


def test_what_is_kept_for_backward_is_the_logits_and_two_numbers_a_row(kernel_device):
    logits, target = sample(kernel_device, 6, 300, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        ops.fused_cross_entropy(logits.requires_grad_(), target).backward()
    extra = [one for one in kept if one.data_ptr() not in (logits.data_ptr(), target.data_ptr())]
    assert [one.numel() for one in extra] == [2 * 6 + 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_leaves_the_logits_as_they_are(kernel_device, dtype):
    logits, target = sample(kernel_device, 6, 300, dtype=dtype)
    leaf = logits.requires_grad_()
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with torch.autocast(kernel_device.type, dtype=torch.bfloat16), hooks:
        loss = ops.fused_cross_entropy(leaf, target)
    assert loss.dtype == torch.float32
    assert kept[0].data_ptr() == logits.data_ptr()
    torch.testing.assert_close(loss.double(), truth(logits, target).detach(), rtol=1e-6, atol=1e-6)
    loss.backward()
    assert leaf.grad.dtype == dtype


def test_a_second_derivative_is_refused_by_name(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    leaf = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(ops.fused_cross_entropy(leaf, target), leaf, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(truth(leaf, target).float(), leaf)[0])
    with pytest.raises(ConfigError, match="fused_cross_entropy has no second derivative .* F.cross_entropy"):
        gradient.square().sum().backward()


def test_the_reference_can_be_differentiated_twice():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, 5, 0])

    def loss(one):
        return cross_entropy_reference(one, target, label_smoothing=0.1, z_loss=0.1, softcap=2.0)

    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradgradcheck(loss, logits)


def test_torch_serves_subclasses(kernel_device, monkeypatch):
    logits, target = sample(kernel_device, 6, 30)
    expected = ops.fused_cross_entropy(logits, target)
    monkeypatch.setattr("fabricamp.ops.cross_entropy._CrossEntropy", None)
    loss = ops.fused_cross_entropy(logits.as_subclass(Elsewhere), target)
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected)


@in_pairs("runs, dynamic", ["kernel", "torch"], [False, True])
def test_compiles_whole(kernel_device, runs, dynamic):
    torch._dynamo.reset()
    logits, target = sample(kernel_device, 6, 300, dtype=torch.bfloat16)

    def loss_of(one):
        return ops.fused_cross_entropy(one * 2, target, label_smoothing=0.1, z_loss=1e-3)

    gradients = []
    with dispatch.always("cupy" if runs == "kernel" else "torch"):
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for function in (loss_of, compiled):
            leaf = logits.clone().requires_grad_()
            loss = function(leaf)
            loss.backward()
            gradients.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*gradients)


def test_compiled_nothing_is_written_over(kernel_device):
    torch._dynamo.reset()
    logits, target = sample(kernel_device, 6, 30)
    leaf = logits.requires_grad_()
    before = leaf.detach().clone()
    compiled = torch.compile(ops.fused_cross_entropy, fullgraph=True, backend="aot_eager")
    compiled((leaf * 1).view(6, 30), target, in_place=True).backward()
    assert torch.equal(leaf, before)
    torch.testing.assert_close(leaf.grad.double(), torch.autograd.grad(truth(leaf, target), leaf)[0].double())


def test_exports(kernel_device):
    logits, target = sample(kernel_device, 6, 30)

    class Loss(torch.nn.Module):
        def forward(self, logits, target):
            return ops.fused_cross_entropy(logits, target, label_smoothing=0.1)

    exported = torch.export.export(Loss(), (logits, target))
    assert any("fabricamp.cross_entropy" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(logits, target), Loss()(logits, target))


@in_pairs("reduction, runs", ["mean", "none"], ["kernel", "torch"])
def test_the_registered_operations_are_well_formed(kernel_device, reduction, runs):
    logits, target = sample(kernel_device, 6, 30)
    rule = CrossEntropyRule(0.1, -100, reduction, 0.01, 5.0)
    forward, backward = torch.ops.fabricamp.cross_entropy.default, torch.ops.fabricamp.cross_entropy_backward.default

    def check():
        torch.library.opcheck(forward, (logits.clone().requires_grad_(), target, *rule))
        loss, statistics = forward(logits, target, *rule)
        torch.library.opcheck(backward, (torch.ones_like(loss), logits, target, statistics, *rule))

    if runs == "kernel":
        check()
    else:
        with references(kernel_device):
            check()


@many
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.floats(0, 1),
    st.sampled_from(["mean", "none"]),
    st.sampled_from([0.0, 2.0]),
    st.integers(0, 99),
)
def test_the_operations_by_torch_equal_float64(rows, classes, smoothing, reduction, softcap, seed):
    logits, target = sample("cpu", rows, classes, seed=seed)
    rule = CrossEntropyRule(smoothing, -100, reduction, 0.1, softcap)
    exact = logits.double().requires_grad_()
    expected = truth(exact, target, **rule._asdict())
    loss, statistics = cross_entropy_forward(logits, target, rule)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6, equal_nan=True)
    gradient = torch.rand(loss.shape)
    expected.backward(gradient.double())
    made = cross_entropy_backward(gradient, logits, target, statistics, rule)
    torch.testing.assert_close(made.double(), exact.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_operations_by_torch_read_no_row_that_does_not_count():
    logits, target = sample("cpu", 4, 6, ignored=0)
    logits[1] = 1000.0  # its exponential overflows fp32
    target[1] = 5
    rule = CrossEntropyRule(ignore_index=5)
    _, statistics = cross_entropy_forward(logits, target, rule)
    made = cross_entropy_backward(torch.ones(()), logits, target, statistics, rule)
    assert made[1].count_nonzero() == 0
    assert made.isfinite().all()


# Without kernels, and what is refused


def test_the_table_of_the_package_names_it():
    bands = dispatch.bands_of(dispatch._read(dispatch.SHIPPED)["9.0"], "cross_entropy", torch.bfloat16)
    assert dispatch.runner(bands, 50304) == "cupy"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_serves_where_kernels_do_not_run(dtype, rule):
    logits, target = sample("cpu", 6, 40, dtype=dtype)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, expected = ops.fused_cross_entropy(leaf, target, **rule), truth(exact, target, **rule)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
    loss.sum().backward()
    expected.sum().backward()
    rounding = ROUNDING.get(dtype, 1e-12)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("value", [40, -1])
def test_a_target_that_names_no_class_is_refused_on_a_cpu(value):
    logits, target = sample("cpu", 2, 3, 40)
    target[1, 2] = value
    with pytest.raises(ConfigError, match=rf"target\[1, 2\] is {value}, but there are 40 classes: targets are 0 to 39"):
        ops.fused_cross_entropy(logits, target)
    with pytest.raises(ConfigError, match=r"target is 7, but there are 5 classes"):
        ops.fused_cross_entropy(torch.zeros(5), torch.tensor(7))


def test_by_torch_on_a_gpu_such_a_row_is_nan(monkeypatch):
    monkeypatch.setattr("fabricamp.ops.cross_entropy._refuse", lambda *_: None)  # as if the targets were on a GPU
    logits, target = sample("cpu", 4, 6, ignored=0)
    target[2] = 6
    leaf = logits.requires_grad_()
    for ignore_index in (-100, 0):
        leaf.grad = None
        losses = ops.fused_cross_entropy(leaf, target, ignore_index=ignore_index, reduction="none")
        losses.sum().backward()
        assert losses.isnan().tolist() == [False, False, True, False]
        assert leaf.grad.isnan().all(-1).tolist() == losses.isnan().tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "avg"}, "reduction='avg' is not known.*'mean', 'sum', 'none'"),
        ({"reduction": "means"}, "did you mean 'mean'"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5 .* from 0 to 1"),
        ({"z_loss": -1.0}, r"z_loss=-1.0 .* 0 or a positive number"),
        ({"z_loss": math.nan}, "z_loss=nan"),
        ({"softcap": math.inf}, r"softcap=inf .* a positive number, or 0 for none"),
        ({"target": torch.zeros(3)}, r"targets of torch.float32: .* int64 or int32"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"shape \(3, 5\) and targets of shape \(4,\): classes are the last"),
        ({"logits": torch.zeros(3, 0)}, r"logits of shape \(3, 0\)"),
        ({"logits": torch.zeros(())}, r"logits of shape \(\)"),
        ({"logits": torch.zeros(3, 5, dtype=torch.int64)}, "logits of torch.int64: give a floating dtype"),
        ({"logits": torch.zeros(3, 5, device="meta")}, "logits are on meta and targets on cpu"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, message):
    given_arguments = {"logits": torch.zeros(3, 5), "target": torch.zeros(3, dtype=torch.int64)} | arguments
    with pytest.raises(ConfigError, match=message):
        ops.fused_cross_entropy(given_arguments.pop("logits"), given_arguments.pop("target"), **given_arguments)


def test_under_torch_func_torch_runs(kernel_device):
    logits, target = sample(kernel_device, 6, 30)
    found = torch.func.grad(lambda given: ops.fused_cross_entropy(given, target))(logits)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(ops.fused_cross_entropy(logits, target), logits)
    torch.testing.assert_close(found, expected)
