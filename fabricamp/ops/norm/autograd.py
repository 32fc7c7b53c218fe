"""The kernels of LayerNorm and RMSNorm under autograd: as an autograd function, and as registered operations for compilers.

At the end stand the norms in torch's own operations: used where no kernel runs, and for second and higher derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.context import Context
from fabricamp.ops.norm.kernels import Kernels, NormFunction, kernels_of
from fabricamp.ops.norm.plans import Norm
from fabricamp.torch_private import functorch_active, is_batched_gradient, unobserved_apply


class _Saved(Context, Protocol):
    """The input (or output) of a norm, its weight, its bias and its statistics."""

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]: ...


class _EagerContext(_Saved, Protocol):
    kernels: Kernels


class _OperationContext(_Saved, Protocol):
    norm: Norm
    eps: float


class _Normalise(torch.autograd.Function):
    """Runs the kernels under autograd in eager mode: a custom operator would cost more host time in every call."""

    @staticmethod
    def forward(ctx: _EagerContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: Kernels) -> Tensor:
        output, statistics = kernels.forward(x, weight, bias)
        ctx.save_for_backward(output if kernels.norm.efficient else x, weight, bias, statistics)
        ctx.kernels = kernels
        return output

    @staticmethod
    def backward(ctx: _EagerContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernels = ctx.kernels
        if torch.is_grad_enabled() or is_batched_gradient(gradient) or functorch_active():
            return *_differentiable(ctx, kernels.norm, kernels.eps, gradient), None
        saved, weight, bias, statistics = ctx.saved_tensors
        _, of_weight, of_bias, _ = ctx.needs_input_grad
        return *kernels.backward(gradient.contiguous(), saved, statistics, weight, bias, of_weight or of_bias), None


_normalise: Final = unobserved_apply(_Normalise)


def by_kernels(kernels: Kernels) -> NormFunction:
    """Returns a function that normalises an input by weight and bias, for eager calls without observers (compilers, modes)."""

    def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            output: Tensor = _normalise(x, weight, bias, kernels)
            return output
        return kernels.forward(x, weight, bias)[0]

    return normalise


def _differentiable(ctx: _Saved, norm: Norm, eps: float, gradient: Tensor) -> list[Tensor | None]:
    """Returns the gradients by torch's operations, for ``create_graph=True`` (a second derivative) or a batch of gradients."""
    create_graph = torch.is_grad_enabled()
    if norm.efficient:
        raise ConfigError(
            "a norm with memory_efficient=True keeps its output in place of its input, and a second derivative, or a batch of "
            "gradients, needs the input; make it with memory_efficient=False"
        )
    x, weight, bias, _ = ctx.saved_tensors
    with torch.enable_grad():
        rows = x.reshape(-1, norm.width)
        factor = None if weight is None else weight.reshape(norm.width)
        shift = None if bias is None else bias.reshape(norm.width)
        if norm.center:
            result = layer_norm_reference(rows, norm.width, factor, shift, eps=eps, dtype=norm.output)
        else:
            result = rms_norm_reference(rows, norm.width, factor, eps, dtype=norm.output)
    needs = ctx.needs_input_grad[:3]
    operands = zip((x, weight, bias), needs, strict=True)
    wanted = [operand for operand, needed in operands if needed and operand is not None]
    gradients = torch.autograd.grad(result, wanted, gradient.reshape(result.shape), create_graph=create_graph)
    remaining = iter(gradients)
    return [next(remaining) if needed else None for needed in needs]


def registered(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, eps: float) -> Tensor:
    """Returns ``x`` normalised by one registered operation, for compilers and modes that record operations."""
    x = x.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    output: Tensor = _forward_op(x, weight, bias, norm.width, eps, norm.output, norm.center, norm.efficient)[0]
    return output


@torch.library.custom_op(
    "fabricamp::norm_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, SymInt width, float eps, ScalarType dtype, bool center, bool efficient)"
    " -> (Tensor, Tensor)",
)
def _forward_op(x: Tensor, weight: Tensor | None, bias: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    width, eps, dtype, center, efficient = how
    norm = _norm_of(x.dtype, weight, bias, width, dtype, center, efficient, x.device)
    return _kernels_of(norm, x, weight, bias, eps).forward(x, weight, bias)


@_forward_op.register_fake
def _forward_shapes(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, width, _, dtype, center, _ = rest
    rows = x.numel() // width
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(2 * rows if center else rows, dtype=torch.float32)


@torch.library.custom_op(
    "fabricamp::norm_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor saved, Tensor statistics, Tensor? weight, Tensor? bias, SymInt width, float eps, "
    "ScalarType dtype, bool center, bool efficient, bool sums) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(gradient: Tensor, saved: Tensor, statistics: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, width, eps, dtype, center, efficient, sums = rest
    norm = _norm_of(dtype, weight, bias, width, gradient.dtype, center, efficient, gradient.device)
    kernels = _kernels_of(norm, gradient, weight, bias, eps)
    of_input, of_weight, of_bias = kernels.backward(gradient.contiguous(), saved, statistics, weight, bias, sums)
    # An operator returns tensors only; the backward of the operator does not look at an empty one.
    of_weight = gradient.new_empty(0) if of_weight is None else of_weight
    of_bias = gradient.new_empty(0) if of_bias is None else of_bias
    return of_input, of_weight, of_bias


@_backward_op.register_fake
def _backward_shapes(gradient: Tensor, saved: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, weight, bias, _, _, dtype, _, _, sums = rest
    of_weight = gradient.new_empty(0) if weight is None or not sums else torch.empty_like(weight)
    of_bias = gradient.new_empty(0) if bias is None or not sums else torch.empty_like(bias)
    return saved.new_empty(saved.shape, dtype=dtype), of_weight, of_bias


def _kernels_of(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Kernels:
    first = bias if weight is None else weight
    return kernels_of(norm, tuple(x.shape), () if first is None else tuple(first.shape), eps)


def _norm_of(
    given: torch.dtype,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    output: torch.dtype,
    center: bool,
    efficient: bool,
    device: torch.device,
) -> Norm:
    """Returns the description of the norm for a registered operation; the kernel was chosen before."""
    first = bias if weight is None else weight
    parameter = None if first is None else first.dtype
    return Norm(width, center, given, output, parameter, weight is not None, bias is not None, efficient, device)


def _setup_context(ctx: _OperationContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, width, eps, dtype, center, efficient = inputs
    normalised, statistics = output
    ctx.save_for_backward(normalised if efficient else x, weight, bias, statistics)
    ctx.norm = _norm_of(x.dtype, weight, bias, width, dtype, center, efficient, x.device)
    ctx.eps = eps


def _backward_of_op(ctx: _OperationContext, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    norm = ctx.norm
    if torch.is_grad_enabled():
        return *_differentiable(ctx, norm, ctx.eps, gradient), *[None] * 5
    saved, weight, bias, statistics = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    gradients = _backward_op(
        gradient, saved, statistics, weight, bias, norm.width, ctx.eps, norm.input, norm.center, norm.efficient,
        any(needed[1:]),
    )  # fmt: skip
    return *[own if wanted else None for own, wanted in zip(gradients, needed, strict=True)], *[None] * 5


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)


def layer_norm_reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    *parameters: Tensor | None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`~fabricamp.ops.layer_norm`, with weight and bias as ``parameters``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    widened = [None if parameter is None else parameter.to(wide) for parameter in parameters]
    weight, bias, *_ = (*widened, None, None)
    return F.layer_norm(x.to(wide), shape_of(normalized_shape), weight, bias, eps).to(dtype or x.dtype)


def rms_norm_reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`~fabricamp.ops.rms_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    over = tuple(range(-len(shape_of(normalized_shape)), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    result = wide * (wide.square().mean(over, keepdim=True) + least).rsqrt()
    return (result if weight is None else result * weight).to(dtype or x.dtype)


def shape_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Returns a ``normalized_shape`` as a tuple."""
    # A constant for torch.compile, which treats the choice of kernel or torch as a constant.
    if isinstance(given, int) or hasattr(given, "__index__"):
        return (index(given),)
    return tuple([index(size) for size in given])
