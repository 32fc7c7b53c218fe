"""LayerNorm and RMSNorm in torch's own operations: used where no kernel runs, and for second and higher derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    *parameters: Tensor | None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`~fabricamp.ops.layer_norm`, with weight and bias as ``parameters``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias, *_ = (*(None if one is None else one.to(wide) for one in parameters), None, None)
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
    return tuple([index(one) for one in given])
