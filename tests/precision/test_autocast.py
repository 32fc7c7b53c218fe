"""Autocast as the steps use it, and the user's own half, float and promote functions."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fabricamp.precision import OptLevel
from fabricamp.precision import autocast as casts


def dtypes(*args, **kwargs):
    return [x.dtype for x in (*args, *kwargs.get("more", [])) if isinstance(x, torch.Tensor)]


HALF, BF16, FULL, DOUBLE = (
    torch.ones(1, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


@pytest.mark.parametrize(
    ("decorate", "given", "expected"),
    [
        (casts.half_function, (FULL, BF16, DOUBLE), [torch.float16, torch.float16, torch.float64]),
        (casts.float_function, (HALF, BF16, DOUBLE), [torch.float32, torch.float32, torch.float64]),
        (casts.promote_function, (HALF, FULL), [torch.float32, torch.float32]),
        (casts.promote_function, (HALF, DOUBLE), [torch.float64, torch.float64]),
        (casts.promote_function, (HALF, HALF), [torch.float16, torch.float16]),
    ],
)
def test_rules_act_under_autocast_only(decorate, given, expected):
    function = decorate(dtypes)
    plain = [tensor.dtype for tensor in given]
    assert function(*given) == plain
    precision = OptLevel("O1")
    precision.convert_module(nn.Linear(1, 1))
    assert precision.forward(function, *given) == expected
    assert precision.forward(lambda: function(given[0], more=list(given[1:]))) == expected
    assert function(*given) == plain


def test_a_float_function_is_fp32_inside_too():
    function = casts.float_function(lambda x: (x @ x).dtype)
    with torch.autocast("cpu", torch.float16):
        assert function(torch.ones(2, 2)) is torch.float32


def test_a_static_method_of_an_autograd_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        @casts.float_function
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            return 3 * ctx.saved_tensors[0] ** 2 * gradient

    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        assert Cube.apply(x).dtype is torch.float32


def test_registration():
    library = types.ModuleType("library")
    library.scale = dtypes
    casts.register_half_function(library, "scale")
    casts.register_float_function(library, "scale")  # the last registration applies
    with torch.autocast("cpu", torch.float16):
        assert library.scale(HALF) == [torch.float32]
    assert library.scale.__wrapped__ is dtypes
    with pytest.raises(ValueError, match=r"No function named scal in module library; did you mean 'scale'\?"):
        casts.register_promote_function(library, "scal")


def test_entering_inside_itself_and_after_an_error():
    context = casts.Autocast("cpu", torch.bfloat16)
    with context:
        with context:
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyError), context:
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


def test_half_weights_are_never_stale():
    net = nn.Linear(2, 2)
    precision = OptLevel("O4")
    precision.convert_module(net)
    x = torch.ones(1, 2)
    first = precision.forward(net, x)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    assert not first.eq(0).all()
    assert precision.forward(net, x).eq(0).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_rules_act_in_a_recomputation(reentrant):
    seen = []

    @casts.float_function
    def note(x):
        seen.append(x.dtype)
        return x * x

    net = nn.Linear(2, 2)
    precision = OptLevel("O1", loss_scale=1.0)
    precision.convert_module(net)
    x = torch.ones(1, 2, requires_grad=True)
    loss = precision.forward(lambda: checkpoint(lambda v: note(net(v)), x, use_reentrant=reentrant).sum())
    precision.backward(loss)
    assert seen == [torch.float32, torch.float32]
    assert net.weight.grad is not None
