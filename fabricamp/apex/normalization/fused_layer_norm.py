"""apex's norms, with its names, order of arguments and defaults, as functions, modules and autograd functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.apex._norm_function import NormFunction
from fabricamp.nn import norms
from fabricamp.ops.norm.autograd import rms_norm_reference
from fabricamp.ops.norm.normalization import layer_norm, rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def supports_custom_op() -> bool:
    """Returns True: the norms are custom operators that torch.compile supports."""
    return True


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002  # apex's names and order
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in the input's dtype."""
    return layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` without parameters, in the input's dtype."""
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
    """Returns the RMSNorm of ``input`` in the input's dtype."""
    return rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` without parameters, in the input's dtype."""
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
    """Returns the RMSNorm of ``input`` by torch's operations, in the dtype of ``weight`` if there is one, else of ``input``."""
    dtype = input.dtype if weight is None else weight.dtype
    return rms_norm_reference(input, normalized_shape, weight, eps, dtype=dtype)


class FusedLayerNorm(norms.FusedLayerNorm):
    """:class:`fabricamp.nn.FusedLayerNorm` under apex's name."""


class FusedRMSNorm(norms.FusedRMSNorm):
    """:class:`fabricamp.nn.FusedRMSNorm` under apex's name."""


class MixedFusedLayerNorm(norms.MixedFusedLayerNorm, FusedLayerNorm):
    """:class:`fabricamp.nn.MixedFusedLayerNorm` under apex's name."""


class MixedFusedRMSNorm(norms.MixedFusedRMSNorm, FusedRMSNorm):
    """:class:`fabricamp.nn.MixedFusedRMSNorm` under apex's name."""


class FusedLayerNormAffineFunction(NormFunction):
    """The autograd function of :func:`fused_layer_norm_affine`."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction(NormFunction):
    """The autograd function of :func:`fused_layer_norm`."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineMixedDtypesFunction(NormFunction):
    """The autograd function of :func:`mixed_dtype_fused_layer_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormAffineFunction(NormFunction):
    """The autograd function of :func:`fused_rms_norm_affine`."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction(NormFunction):
    """The autograd function of :func:`fused_rms_norm`."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineMixedDtypesFunction(NormFunction):
    """The autograd function of :func:`mixed_dtype_fused_rms_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)
