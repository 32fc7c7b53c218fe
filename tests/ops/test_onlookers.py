"""Norms and losses under transforms, tracers, dispatch modes and forward derivatives: correct results, by torch if necessary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch, fused_cross_entropy, fused_linear_cross_entropy, layer_norm, rms_norm
from fabricamp.ops.norm import kernels as norm_kernels
from tests.cuda_on_cpu.compiler import ON_GPU

RULE = {"label_smoothing": 0.1, "ignore_index": 3}
NAMES = ["layer_norm", "rms_norm", "cross_entropy", "linear_cross_entropy", "its mean"]

pytestmark = pytest.mark.parametrize("kernel_device", ["forward", ON_GPU], indirect=True)


@pytest.fixture(autouse=True)
def _kernels_wherever_they_run(kernel_device):
    norm_kernels.forget()
    with dispatch.always("cupy"):
        yield
    norm_kernels.forget()


class Pair:
    """A function of ours and torch's counterpart, with one input and several outputs."""

    def __init__(self, name, device):
        generator = torch.Generator().manual_seed(0)
        self.x, weight, bias = (
            torch.randn(*shape, generator=generator).to(device) for shape in [(4, 24), (24,), (24,)]
        )
        head = torch.randn(30, 24, generator=generator).to(device)
        self.target = torch.tensor([3, 0, 23, 7], device=device)
        self.ours, self.torchs = {
            "layer_norm": (lambda x: layer_norm(x, 24, weight, bias), lambda x: F.layer_norm(x, (24,), weight, bias)),
            "rms_norm": (
                lambda x: rms_norm(x, 24, weight, 1e-5),
                lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight,
            ),
            "cross_entropy": (
                lambda x: fused_cross_entropy(x, self.target, reduction="none", **RULE),
                lambda x: F.cross_entropy(x, self.target, reduction="none", **RULE),
            ),
            "linear_cross_entropy": (
                lambda x: fused_linear_cross_entropy(x, head, self.target, reduction="none", **RULE),
                lambda x: F.cross_entropy(F.linear(x, head), self.target, reduction="none", **RULE),
            ),
            "its mean": (
                lambda x: fused_linear_cross_entropy(x, head, self.target, **RULE),
                lambda x: F.cross_entropy(F.linear(x, head), self.target, **RULE),
            ),
        }[name]

    def agree(self, of):
        """Compares the results of ``of`` for both functions."""
        torch.testing.assert_close(of(self.ours), of(self.torchs), rtol=1e-4, atol=1e-5)


@pytest.fixture(params=NAMES)
def pair(request, kernel_device):
    return Pair(request.param, kernel_device)


def test_forward_derivatives(pair):
    def tangent(function, **how):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(
                function(forward_ad.make_dual(pair.x.clone().requires_grad_(**how), pair.x))
            ).tangent

    for requires_grad in (False, True):
        found, expected = (tangent(one, requires_grad=requires_grad) for one in (pair.ours, pair.torchs))
        torch.testing.assert_close(found, expected)


def test_batches_of_gradients(pair):
    x = pair.x.requires_grad_()
    upstream = torch.randn(3, *pair.ours(x).shape, generator=torch.Generator().manual_seed(1)).to(x.device)
    pair.agree(lambda function: torch.autograd.grad(function(x), x, upstream, is_grads_batched=True)[0])
    pair.agree(lambda function: torch.autograd.functional.jacobian(function, x, vectorize=True))


def test_a_batch_of_gradients_needs_the_input(kernel_device):
    x = torch.ones(2, 24, device=kernel_device).requires_grad_()
    made = rms_norm(x, 24, memory_efficient=True)
    with pytest.raises(ConfigError, match="a batch of gradients, needs the input"):
        torch.autograd.grad(made, x, torch.ones(3, 2, 24, device=kernel_device), is_grads_batched=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.hessian])
def test_transforms(pair, transform):
    pair.agree(lambda function: transform(lambda x: function(x).sin().sum())(pair.x))


def test_what_a_transform_has_left_behind(pair):
    left = []
    torch.func.grad(lambda x: (left.append(2 * x), x.sum())[1])(pair.x)
    with torch.no_grad():
        pair.agree(lambda function: function(left[0]))
    pair.agree(lambda function: function(left[0]).detach())


def test_compiled_transforms(pair):
    torch._dynamo.reset()

    def compiled(function):
        gradient = torch.func.grad(lambda x: function(x).sin().sum())
        return torch.compile(gradient, fullgraph=True, backend="aot_eager")(pair.x)

    pair.agree(compiled)


def test_a_gradient_for_each_sample(kernel_device):
    pair = Pair("cross_entropy", kernel_device)

    def each(loss):
        of_one = torch.func.grad(lambda scale, row, label: loss(scale * row, label))
        return torch.func.vmap(of_one, in_dims=(None, 0, 0))(torch.ones(24, device=kernel_device), pair.x, pair.target)

    torch.testing.assert_close(each(fused_cross_entropy), each(F.cross_entropy))


def test_make_fx_records_them(pair):
    graph = make_fx(pair.ours)(pair.x)
    other = pair.x.flip(0) * 3
    torch.testing.assert_close(graph(other), pair.ours(other))


@pytest.mark.filterwarnings("ignore")  # torch's warnings about every number that is read from a shape
def test_torch_jit_trace_records_them(pair):
    traced = torch.jit.trace(pair.ours, pair.x)
    other = (pair.x.flip(0) * 3).requires_grad_()
    made, expected = traced(other), pair.torchs(other)
    torch.testing.assert_close(made, expected)
    gradients = [torch.autograd.grad(one.sin().sum(), other)[0] for one in (made, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_modes_see_one_operation(pair):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = pair.x.requires_grad_()
    with Watch():
        made = pair.ours(x)
    assert [name.split(".")[0] for name in seen if "fabricamp" in name] == ["fabricamp"]
    pair.agree(
        lambda function: torch.autograd.grad(made if function is pair.ours else function(x), x, torch.ones_like(made))[
            0
        ]
    )


def test_fake_tensors(pair):
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = pair.ours(pair.x)
    assert type(made) is FakeTensor
    assert made.shape == pair.ours(pair.x).shape
    assert made.device == pair.x.device


def test_targets_that_are_not_there_are_not_looked_at(kernel_device):
    with FakeTensorMode():
        loss = fused_cross_entropy(torch.ones(4, 24), torch.zeros(4, dtype=torch.int64))
    assert loss.shape == ()
    assert fused_cross_entropy(
        torch.ones(4, 24, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    ).is_meta


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(pair, reentrant):
    x = pair.x.requires_grad_()

    def gradient(function):
        made = checkpoint(function, x, use_reentrant=reentrant)
        return torch.autograd.grad(made.sin().sum(), x)[0] if not reentrant else accumulated(made)

    def accumulated(made):
        x.grad = None
        made.sin().sum().backward()
        return x.grad

    pair.agree(gradient)
    with torch.autograd.graph.save_on_cpu():
        made = pair.ours(x)
    torch.testing.assert_close(torch.autograd.grad(made.sin().sum(), x)[0], gradient(pair.torchs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_parameters_on_another_device_are_refused(kernel_device, norm):
    x, elsewhere = torch.ones(2, 24, device=kernel_device), torch.ones(24, device="meta")
    with pytest.raises(ConfigError, match=f"the input is on {x.device} and weight on meta: move one of them"):
        norm(x, 24, elsewhere)


def test_fp64_stays_fp64_under_autocast(pair):
    with torch.autocast(pair.x.device.type, torch.bfloat16):
        for norm in (layer_norm, rms_norm):
            assert norm(pair.x.double(), 24).dtype == torch.float64
            assert norm(pair.x, 24).dtype == torch.bfloat16
        assert fused_cross_entropy(pair.x.double(), pair.target).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_torchs(kernel_device, layout):
    rows = torch.randn(3, 24, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    weight, bias = torch.full_like(rows[0], 2.0), rows[1]
    made = layer_norm(torch.nested.nested_tensor([rows[:1], rows], layout=layout), 24, weight, bias)
    for one, expected in zip(made.unbind(), (rows[:1], rows), strict=True):
        torch.testing.assert_close(one, layer_norm(expected, 24, weight, bias))


def test_tensors_without_data(kernel_device):
    x, weight = torch.ones(2, 24, device="meta"), torch.ones(24, device="meta")
    for made in (layer_norm(x, 24, weight, weight), rms_norm(x, 24, weight)):
        assert made.shape == x.shape
        assert made.is_meta


@pytest.mark.parametrize("efficient", [False, True])
def test_weights_of_both_signs_at_any_place(kernel_device, efficient):
    generator = torch.Generator().manual_seed(4)
    x, upstream = (torch.randn(5, 24, generator=generator).to(kernel_device) for _ in range(2))
    flat = torch.randn(49, generator=generator).to(kernel_device)
    flat = (flat.sign() * (flat.abs() + 0.5)).requires_grad_()

    def gradients(norm, how):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(norm(leaf, (24,), flat[1:25], flat[25:], **how), [leaf, flat], upstream)

    found, expected = gradients(layer_norm, {"memory_efficient": efficient}), gradients(F.layer_norm, {})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
