"""LayerNorm and RMSNorm, forward and backward: kernels where they are faster, torch's own operations elsewhere.

Input, output, weight and bias may differ in dtype; the arithmetic is fp32, and fp64 is torch's.  Under autocast the output has its
dtype, and nothing is rounded before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import index
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.dispatch import chosen, is_batch, recorded, torch_alone
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm.kernels import Statistics
from fabricamp.ops.norm.plans import Norm
from fabricamp.torch_private import exporting

_KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_PLAIN: Final = (Tensor, torch.nn.Parameter)
"""What has memory of its own; others stand for tensors that are elsewhere, or nowhere, and torch's operations know them."""


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns ``x`` minus its mean over the last dimensions, over its deviation, times ``weight``, plus ``bias``.

    The output has ``dtype``, by default that of ``x``, under autocast always autocast's.  ``memory_efficient`` keeps the output for
    backward in place of the input: it saves memory where the output is kept anyway, and loses accuracy where ``weight`` is near 0.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), 2, eps=0.0)
    tensor([[-1.,  1.]])
    """
    shape = _shape(normalized_shape)
    _check(x, shape, weight, bias)
    output = _output(x, dtype)
    if not _by_kernel("layer_norm", x, shape, weight, bias, output):
        with _without_autocast(x):
            if _alike(x, weight, bias, output):
                return F.layer_norm(x, shape, weight, bias, eps)
            return layer_norm_reference(x, shape, weight, bias, eps, dtype=output)
    return _run(x, weight, bias, _norm(x, shape, weight, bias, output, True, memory_efficient), eps)


def layer_norm_reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What :func:`layer_norm` does, in torch's own operations, as often differentiable as they are."""
    wide = torch.promote_types(x.dtype, torch.float32)
    factor, shift = (None if one is None else one.to(wide) for one in (weight, bias))
    return F.layer_norm(x.to(wide), _shape(normalized_shape), factor, shift, eps).to(dtype or x.dtype)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns ``x`` over the root of its mean square over the last dimensions, times ``weight``.

    ``eps`` is by default the smallest step from 1 of the arithmetic's dtype, as torch's; the rest as in :func:`layer_norm`.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), 2, eps=0.0)
    tensor([[1., 1.]])
    """
    shape = _shape(normalized_shape)
    _check(x, shape, weight, None)
    output = _output(x, dtype)
    if not _by_kernel("rms_norm", x, shape, weight, None, output):
        with _without_autocast(x):
            # torch's own RMSNorm is one operation on a GPU, which not every transform knows.
            if _alike(x, weight, None, output) and not torch_alone():
                return F.rms_norm(x, shape, weight, eps)
            return rms_norm_reference(x, shape, weight, eps, dtype=output)
    least = torch.finfo(torch.float32).eps if eps is None else eps
    return _run(x, weight, None, _norm(x, shape, weight, None, output, False, memory_efficient), least)


def rms_norm_reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What :func:`rms_norm` does, in torch's own operations, as often differentiable as they are."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    over = tuple(range(-len(_shape(normalized_shape)), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    result = wide * (wide.square().mean(over, keepdim=True) + least).rsqrt()
    return (result if weight is None else result * weight).to(dtype or x.dtype)


def _shape(given: int | Sequence[int]) -> tuple[int, ...]:
    # A constant for torch.compile, which takes the choice of what runs for one.
    if isinstance(given, int) or hasattr(given, "__index__"):
        return (index(given),)
    return tuple([index(one) for one in given])


def _check(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    # Nested tensors of the older layout have no shape; torch checks them.
    if not shape or (not x.is_nested and tuple(x.shape[-len(shape) :]) != shape):
        raise ConfigError(
            f"normalized_shape={shape} are not the last dimensions of an input of shape {tuple(x.shape)}; give those that "
            "one mean is taken over"
        )
    if not x.is_floating_point():
        raise ConfigError(f"a norm takes floating-point inputs, not {x.dtype}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is None:
            continue
        if tuple(one.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(one.shape)}, and needs normalized_shape={shape}")
        if one.device != x.device:
            raise ConfigError(f"the input is on {x.device} and {name} on {one.device}: move one of them")


def _output(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if _is_autocast(x) else dtype or x.dtype


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast says what comes out: it leaves fp64 alone, and does not know tensors without data."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    # The context manager costs more than a norm's launch: only where there is something to switch off.
    return torch.autocast(x.device.type, enabled=False) if _is_autocast(x) else contextlib.nullcontext()


def _alike(x: Tensor, weight: Tensor | None, bias: Tensor | None, output: torch.dtype) -> bool:
    """Whether all have one dtype, which torch's own functions want."""
    dtype = x.dtype
    return output == dtype and (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype)


def _by_kernel(
    op: str, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, output: torch.dtype
) -> bool:
    """Whether a kernel runs: it can, a table says so, and nothing records torch's operations for elsewhere."""
    if not chosen(op, x.dtype if _alike(x, weight, bias, output) else None, math.prod(shape), x.device):
        return False
    operands = [one for one in (x, weight, bias) if one is not None]
    if torch.compiler.is_compiling():
        # What is exported has to load where there is no fabricamp.  is_exporting() is True under any compilation in torch 2.11.
        if exporting():
            return False
    elif x.is_nested or any(type(one) not in _PLAIN for one in operands):
        return False
    if torch_alone():
        return False
    if bias is not None and weight is not None and bias.dtype != weight.dtype:
        return False
    return x.numel() > 0 and all(dtype in _KERNEL_DTYPES for dtype in (output, *[one.dtype for one in operands]))


def _norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    output: torch.dtype,
    center: bool,
    efficient: bool,
) -> Norm:
    first = bias if weight is None else weight
    parameter = None if first is None else first.dtype
    has_weight, has_bias = weight is not None, bias is not None
    return Norm(math.prod(shape), center, x.dtype, output, parameter, has_weight, has_bias, efficient, x.device)


def _run(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float) -> Tensor:
    x, eps = x.contiguous(), float(eps)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if recorded():
        result: Tensor = _forward_op(x, weight, bias, norm.width, eps, norm.output, norm.center, norm.efficient)[0]
        return result
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        normalised: Tensor = _Normalise.apply(x, weight, bias, norm, eps)  # type: ignore[no-untyped-call]
        return normalised
    return norm_kernels.forward(x, weight, bias, norm, eps)[0]


class _Normalise(torch.autograd.Function):
    """The kernels under autograd: a custom operator's way costs more on the host, and eager calls pay it every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float) -> Tensor:
        output, statistics = norm_kernels.forward(x, weight, bias, norm, eps)
        _keep(ctx, output if norm.efficient else x, weight, bias, statistics, norm, eps)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_batch(gradient):
            return *_differentiable(ctx, gradient), None, None
        saved, weight, bias, mean, root = ctx.saved_tensors
        sums = any(ctx.needs_input_grad[1:3])
        statistics = Statistics(mean, root)
        gradients = norm_kernels.backward(
            gradient.contiguous(), saved, statistics, weight, bias, ctx.norm, ctx.eps, sums=sums
        )
        return *gradients, None, None


def _keep(
    ctx: Any,
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics,
    norm: Norm,
    eps: float,
) -> None:
    ctx.save_for_backward(saved, weight, bias, *statistics)
    ctx.norm, ctx.eps = norm, eps


def _differentiable(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients by torch's operations, for those who differentiate them (``create_graph=True``), or ask for a batch of them."""
    norm: Norm = ctx.norm
    again = torch.is_grad_enabled()
    if norm.efficient:
        raise ConfigError(
            "a norm with memory_efficient=True keeps its output in place of its input, and a second derivative, or a batch of "
            "gradients, needs the input; make it with memory_efficient=False"
        )
    x, weight, bias, *_ = ctx.saved_tensors
    with torch.enable_grad():
        rows = x.reshape(-1, norm.width)
        factor, shift = (None if one is None else one.reshape(norm.width) for one in (weight, bias))
        if norm.center:
            result = layer_norm_reference(rows, norm.width, factor, shift, ctx.eps, dtype=norm.output)
        else:
            result = rms_norm_reference(rows, norm.width, factor, ctx.eps, dtype=norm.output)
    wanted = [one for one, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(result, wanted, gradient.reshape(result.shape), create_graph=again))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


@torch.library.custom_op(
    "fabricamp::norm_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, SymInt width, float eps, ScalarType dtype, bool center, bool efficient)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    dtype: torch.dtype,
    center: bool,
    efficient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    norm = _norm(x, (width,), weight, bias, dtype, center, efficient)
    output, statistics = norm_kernels.forward(x, weight, bias, norm, eps)
    return output, statistics.mean, statistics.root


@_forward_op.register_fake
def _forward_shapes(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, width, _, dtype, center, _ = rest
    rows = x.numel() // width
    mean, root = (x.new_empty(size, dtype=torch.float32) for size in (rows if center else 0, rows))
    return x.new_empty(x.shape, dtype=dtype), mean, root


@torch.library.custom_op(
    "fabricamp::norm_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor saved, Tensor mean, Tensor root, Tensor? weight, Tensor? bias, SymInt width, float eps, "
    "ScalarType dtype, bool center, bool efficient, bool sums) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    gradient: Tensor,
    saved: Tensor,
    mean: Tensor,
    root: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    dtype: torch.dtype,
    center: bool,
    efficient: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = gradient.new_empty(0, dtype=dtype)
    norm = _norm(x, (width,), weight, bias, gradient.dtype, center, efficient)
    found = norm_kernels.backward(
        gradient.contiguous(), saved, Statistics(mean, root), weight, bias, norm, eps, sums=sums
    )
    of_input, of_weight, of_bias = (gradient.new_empty(0) if one is None else one for one in found)
    return of_input, of_weight, of_bias


@_backward_op.register_fake
def _backward_shapes(gradient: Tensor, saved: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, weight, bias, _, _, dtype, _, _, sums = rest
    of_weight, of_bias = (
        gradient.new_empty(0) if one is None or not sums else torch.empty_like(one) for one in (weight, bias)
    )
    return saved.new_empty(saved.shape, dtype=dtype), of_weight, of_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, width, eps, dtype, center, efficient = inputs
    norm = _norm(x, (width,), weight, bias, dtype, center, efficient)
    _keep(ctx, output[0] if efficient else x, weight, bias, Statistics(*output[1:]), norm, eps)


def _backward_of_op(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return *_differentiable(ctx, gradient), *[None] * 5
    saved, weight, bias, *statistics = ctx.saved_tensors
    norm: Norm = ctx.norm
    needed = ctx.needs_input_grad[:3]
    found = _backward_op(
        gradient, saved, *statistics, weight, bias, norm.width, ctx.eps, norm.input, norm.center, norm.efficient,
        any(needed[1:]),
    )  # fmt: skip
    return *[one if wanted else None for one, wanted in zip(found, needed, strict=True)], *[None] * 5


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)
