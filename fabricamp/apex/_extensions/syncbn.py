"""``syncbn``: separate passes of synchronised BatchNorm; :class:`fabricamp.nn.SyncBatchNorm` needs fewer passes.

Inputs are (N, C, ...), those of ``*_c_last`` (..., C).  Statistics are fp32 for half inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def welford_mean_var_c_last(input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002  # apex's name
    """Returns mean and biased variance of each channel."""
    rows = _wide(input).reshape(-1, input.shape[-1])
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    return mean, variance


@torch.no_grad()
def welford_mean_var(input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002  # apex's name
    """Returns mean and biased variance of each channel."""
    return welford_mean_var_c_last(input.movedim(1, -1))


@torch.no_grad()
def welford_parallel(mean: Tensor, var: Tensor, count: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, unbiased variance and ``1 / sqrt(biased variance + eps)`` of all ranks' values.

    ``mean`` and ``var`` (biased) are (ranks, C); ``count`` (ranks) is the number of values per channel on each rank.
    """
    weights = count.to(mean.dtype).unsqueeze(1)
    total = weights.sum()
    merged = (mean * weights).sum(0) / total
    squares = ((var + (mean - merged) ** 2) * weights).sum(0)
    return merged, squares / (total - 1), (squares / total + eps).rsqrt()


@torch.no_grad()
def batchnorm_forward_c_last(
    input: Tensor,  # noqa: A002  # apex's name
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    fuse_relu: bool,
) -> Tensor:
    """Returns the normalised input, times ``weight`` plus ``shift``, plus ``z``, with a ReLU if ``fuse_relu``."""
    value = _affine(input, mean, inv_std, weight, shift)
    if z is not None:
        value = value + z
    return (value.relu() if fuse_relu else value).to(input.dtype)


@torch.no_grad()
def batchnorm_forward(
    input: Tensor,  # noqa: A002  # apex's name
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """Returns the normalised input, times ``weight`` plus ``shift``."""
    value = batchnorm_forward_c_last(input.movedim(1, -1), None, mean, inv_std, weight, shift, fuse_relu=False)
    return value.movedim(-1, 1).contiguous()


@torch.no_grad()
def reduce_bn_c_last(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002  # apex's name
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns per channel the sums of dy and of dy * (x - mean), and the gradients of weight and bias (None without weight)."""
    dy = _wide(grad_output).reshape(-1, input.shape[-1])
    sum_dy = dy.sum(0)
    sum_dy_xmu = (dy * (_wide(input).reshape(dy.shape) - mean)).sum(0)
    if weight is None:
        return sum_dy, sum_dy_xmu, None, None
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * inv_std).to(weight.dtype), sum_dy.to(weight.dtype)


@torch.no_grad()
def reduce_bn(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002  # apex's name
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the same as :func:`reduce_bn_c_last`, for inputs (N, C, ...)."""
    return reduce_bn_c_last(grad_output.movedim(1, -1), input.movedim(1, -1), mean, inv_std, weight)


@torch.no_grad()
def batchnorm_backward_c_last(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002  # apex's name
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Returns the gradient of the input, from sums over all ranks; ``count`` (ranks): each rank's number of values per channel."""
    total = count.sum().to(sum_dy.dtype)
    scale = inv_std if weight is None else inv_std * weight.to(inv_std.dtype)
    centred = _wide(input) - mean
    result = (_wide(grad_output) - sum_dy / total - centred * (inv_std**2 * sum_dy_xmu / total)) * scale
    return result.to(input.dtype)


@torch.no_grad()
def batchnorm_backward(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002  # apex's name
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Returns the same as :func:`batchnorm_backward_c_last`, for inputs (N, C, ...)."""
    last = (grad_output.movedim(1, -1), input.movedim(1, -1))
    return (
        batchnorm_backward_c_last(*last, mean, inv_std, weight, sum_dy, sum_dy_xmu, count).movedim(-1, 1).contiguous()
    )


@torch.no_grad()
def relu_bw_c_last(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002  # apex's name
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """Returns ``grad_output`` where the output of the forward with ``fuse_relu`` is above 0, and 0 elsewhere."""
    value = _affine(input, mean, inv_std, weight, shift)
    if z is not None:
        value = value + z
    return torch.where(value > 0, grad_output, 0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _affine(value: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None) -> Tensor:
    result = (_wide(value) - mean) * inv_std
    if weight is not None:
        result = result * weight
    return result if shift is None else result + shift
