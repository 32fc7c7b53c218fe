"""apex's functions of norms: its names, its order of arguments, its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.ops.norm.normalization import layer_norm, rms_norm, rms_norm_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002  # apex's names and order
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in its own dtype."""
    return layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in its own dtype, without parameters."""
    return layer_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in the dtype of ``weight``."""
    dtype = weight.dtype
    return layer_norm(input, normalized_shape, weight, bias, eps, dtype=dtype, memory_efficient=memory_efficient)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in its own dtype."""
    return rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in its own dtype, without parameters."""
    return rms_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in the dtype of ``weight``."""
    dtype = weight.dtype
    return rms_norm(input, normalized_shape, weight, eps, dtype=dtype, memory_efficient=memory_efficient)


def manual_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns the RMSNorm of ``input`` by torch's own operations; half weights give an output of their dtype."""
    dtype = input.dtype if weight is None else weight.dtype
    return rms_norm_reference(input, normalized_shape, weight, eps, dtype=dtype)
