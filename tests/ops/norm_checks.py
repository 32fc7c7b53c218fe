"""Operands of norms, and their comparison with float64."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from fabricamp.ops import dispatch, layer_norm, rms_norm
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm import plans as norm_plans
from fabricamp.ops.norm.plans import Norm

B, H, S, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {S: 2e-6, H: 1.5e-3, B: 1e-2}
NORMS = {"layer": layer_norm, "rms": rms_norm}


def operands(device, rows, width, dtypes, *, affine=True, bias=True, seed=0):
    """Input, weight and bias, all to be differentiated; weights are not near 0."""
    generator = torch.Generator().manual_seed(seed)

    def make(dtype, *shape):
        return torch.randn(*shape, generator=generator, dtype=D).to(dtype).to(device)

    x = (make(dtypes[0], rows, width) * 2 + 1).requires_grad_()
    weight = (make(dtypes[1], width).abs() + 0.5).requires_grad_() if affine else None
    shift = make(dtypes[1], width).requires_grad_() if affine and bias else None
    return x, weight, shift


def norm_of(kind, width, dtypes, device):
    """Returns the norm's description for the kernels; ``dtypes`` are those of input and output, then of parameters."""
    center = kind == "layer"
    return Norm(width, center, dtypes[0], dtypes[0], dtypes[1], True, center, False, device)


@contextlib.contextmanager
def laid_out(monkeypatch, sizes, **plans):
    """Makes kernels run in clusters of ``sizes``, with these constants of the plans; each cluster processes several rows."""
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: sizes)
    monkeypatch.setattr(norm_plans, "resident_clusters", lambda *_: None)
    monkeypatch.setattr(norm_plans, "processors", lambda device: 1)
    for name, value in plans.items():
        monkeypatch.setattr(norm_plans, name, value)
    norm_kernels.forget()
    with dispatch.always("cupy"):
        yield
    norm_kernels.forget()


def exact(kind, x, weight, bias, eps, upstream):
    """Output and gradients in float64."""
    wide = [None if one is None else one.detach().double().requires_grad_() for one in (x, weight, bias)]
    shape = (x.shape[-1],)
    made = F.layer_norm(wide[0], shape, *wide[1:], eps) if kind == "layer" else F.rms_norm(wide[0], shape, wide[1], eps)
    return made, torch.autograd.grad(made, [one for one in wide if one is not None], upstream.double())


def near(mine, expected, dtype, factor=1.0):
    """Compares the norm of the difference, and each element within the rounding of its dtype."""
    mine, expected = mine.detach().double(), expected.detach()
    assert torch.isfinite(mine).all()
    tolerance = TOLERANCE[dtype] * factor
    assert (mine - expected).norm() <= tolerance * expected.norm() + 1e-12
    torch.testing.assert_close(mine, expected, rtol=10 * tolerance, atol=10 * tolerance * float(expected.std() + 1e-3))


def check(kind, x, weight, bias, *, dtype=None, eps=1e-5, memory_efficient=False, factor=1.0):
    """Compares output and gradients with float64; returns them."""
    parameters = (weight, bias) if kind == "layer" else (weight,)
    made = NORMS[kind](x, x.shape[-1], *parameters, eps=eps, dtype=dtype, memory_efficient=memory_efficient)
    assert made.dtype == (dtype or x.dtype)
    assert type(made.grad_fn).__name__ == "_NormaliseBackward"
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(made.shape, generator=generator).to(made.device, made.dtype)
    inputs = [one for one in (x, *parameters) if one is not None]
    gradients = torch.autograd.grad(made, inputs, upstream, retain_graph=True)
    output, expected = exact(kind, x, weight, bias if kind == "layer" else None, eps, upstream)
    near(made, output, made.dtype)
    for one, other, source in zip(gradients, expected, inputs, strict=True):
        assert one.dtype == source.dtype
        narrow = max((source.dtype, made.dtype) if memory_efficient else (source.dtype,), key=TOLERANCE.__getitem__)
        near(one, other, narrow, factor)
    assert all(
        torch.equal(one, other)
        for one, other in zip(gradients, torch.autograd.grad(made, inputs, upstream), strict=True)
    )
    return made, gradients
