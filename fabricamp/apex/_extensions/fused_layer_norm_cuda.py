"""``fused_layer_norm_cuda``: separate passes of LayerNorm and RMSNorm; :mod:`fabricamp.ops` needs fewer passes.

Means and inverse deviations are fp32, one per row.  With ``memory_efficient`` a backward takes the output instead of the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fabricamp.ops import layer_norm, rms_norm


@torch.no_grad()
def forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: A002
    """Returns output, mean and inverse deviation."""
    return layer_norm(input, normalized_shape, None, None, eps), *_statistics(input, normalized_shape, eps)


@torch.no_grad()
def forward_affine(
    input: Tensor,  # noqa: A002  # apex's name
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output (in the input's dtype), mean and inverse deviation."""
    return layer_norm(input, normalized_shape, weight, bias, eps), *_statistics(input, normalized_shape, eps)


@torch.no_grad()
def forward_affine_mixed_dtypes(
    input: Tensor,  # noqa: A002  # apex's name
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output (in the weight's dtype), mean and inverse deviation."""
    output = layer_norm(input, normalized_shape, weight, bias, eps, dtype=weight.dtype)
    return output, *_statistics(input, normalized_shape, eps)


@torch.no_grad()
def rms_forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Returns output and inverse root of the mean square."""
    return rms_norm(input, normalized_shape, None, eps), _inverse_root(input, normalized_shape, eps)


@torch.no_grad()
def rms_forward_affine(
    input: Tensor,  # noqa: A002  # apex's name
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns output (in the input's dtype) and inverse root of the mean square."""
    return rms_norm(input, normalized_shape, weight, eps), _inverse_root(input, normalized_shape, eps)


@torch.no_grad()
def rms_forward_affine_mixed_dtypes(
    input: Tensor,  # noqa: A002  # apex's name
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns output (in the weight's dtype) and inverse root of the mean square."""
    output = rms_norm(input, normalized_shape, weight, eps, dtype=weight.dtype)
    return output, _inverse_root(input, normalized_shape, eps)


@torch.no_grad()
def backward(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the gradient of the input."""
    normal = _normalised(input_or_output, mean, invvar, None, None, normalized_shape, eps, from_output=memory_efficient)
    return _of_input(grad_output, normal, invvar, None, centre=True).to(input_or_output.dtype).view_as(input_or_output)


@torch.no_grad()
def backward_affine(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, weight and bias."""
    normal = _normalised(
        input_or_output, mean, invvar, weight, bias, normalized_shape, eps, from_output=memory_efficient
    )
    dy = grad_output.float().reshape(normal.shape)
    of_input = _of_input(grad_output, normal, invvar, weight, centre=True)
    of_weight = (dy * normal).sum(0)
    of_bias = dy.sum(0)
    return (
        of_input.to(input_or_output.dtype).view_as(input_or_output),
        of_weight.to(weight.dtype).view_as(weight),
        of_bias.to(bias.dtype).view_as(bias),
    )


@torch.no_grad()
def rms_backward(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the gradient of the input."""
    normal = _normalised(input_or_output, None, invvar, None, None, normalized_shape, eps, from_output=memory_efficient)
    return _of_input(grad_output, normal, invvar, None, centre=False).to(input_or_output.dtype).view_as(input_or_output)


@torch.no_grad()
def rms_backward_affine(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of input and weight."""
    normal = _normalised(
        input_or_output, None, invvar, weight, None, normalized_shape, eps, from_output=memory_efficient
    )
    of_input = _of_input(grad_output, normal, invvar, weight, centre=False)
    of_weight = (grad_output.float().reshape(normal.shape) * normal).sum(0)
    return of_input.to(input_or_output.dtype).view_as(input_or_output), of_weight.to(weight.dtype).view_as(weight)


def _rows(value: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    return value.float().reshape(-1, math.prod(normalized_shape))


def _statistics(value: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_rows(value, normalized_shape), dim=1, correction=0)
    return mean, (variance + eps).rsqrt_()


def _inverse_root(value: Tensor, normalized_shape: Sequence[int], eps: float) -> Tensor:
    return (_rows(value, normalized_shape).square().mean(1) + eps).rsqrt_()


def _normalised(
    saved: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    *,
    from_output: bool,
) -> Tensor:
    """Returns the normalised input (before weight and bias) as rows, from the input, or from the output if ``from_output``."""
    rows = _rows(saved, normalized_shape)
    if not from_output:
        return (rows if mean is None else rows - mean.reshape(-1, 1)) * invvar.reshape(-1, 1)
    if bias is not None:
        rows = rows - bias.float().reshape(-1)
    if weight is None:
        return rows
    flat = weight.float().reshape(-1)
    return rows / torch.where(flat < 0, flat.clamp(max=-eps), flat.clamp(min=eps))


def _of_input(grad_output: Tensor, normal: Tensor, invvar: Tensor, weight: Tensor | None, *, centre: bool) -> Tensor:
    dy = grad_output.float().reshape(normal.shape)
    if weight is not None:
        dy = dy * weight.float().reshape(-1)
    result = dy - normal * (dy * normal).mean(1, keepdim=True)
    if centre:
        result -= dy.mean(1, keepdim=True)
    return result.mul_(invvar.reshape(-1, 1))
