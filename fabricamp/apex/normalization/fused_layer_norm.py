"""The norms of apex as functions, and by the names of its autograd functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.apex._norm_function import NormFunction
from fabricamp.apex.normalization._functions import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from fabricamp.nn import norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
    "supports_custom_op",
]


def supports_custom_op() -> bool:
    """Returns True: the norms are operations that torch.compile knows."""
    return True


class FusedLayerNorm(norms.FusedLayerNorm):
    """:class:`fabricamp.nn.FusedLayerNorm` by apex's name."""


class FusedRMSNorm(norms.FusedRMSNorm):
    """:class:`fabricamp.nn.FusedRMSNorm` by apex's name."""


class MixedFusedLayerNorm(norms.MixedFusedLayerNorm, FusedLayerNorm):
    """:class:`fabricamp.nn.MixedFusedLayerNorm` by apex's name."""


class MixedFusedRMSNorm(norms.MixedFusedRMSNorm, FusedRMSNorm):
    """:class:`fabricamp.nn.MixedFusedRMSNorm` by apex's name."""


class FusedLayerNormAffineFunction(NormFunction):
    """:func:`fused_layer_norm_affine`."""

    apply = staticmethod(fused_layer_norm_affine)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        weight: Tensor,
        bias: Tensor,
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(
            ctx, fused_layer_norm_affine, (input, weight, bias), normalized_shape, eps, memory_efficient
        )


class FusedLayerNormFunction(NormFunction):
    """:func:`fused_layer_norm`."""

    apply = staticmethod(fused_layer_norm)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(ctx, fused_layer_norm, (input,), normalized_shape, eps, memory_efficient)


class FusedLayerNormAffineMixedDtypesFunction(NormFunction):
    """:func:`mixed_dtype_fused_layer_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        weight: Tensor,
        bias: Tensor,
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(
            ctx, mixed_dtype_fused_layer_norm_affine, (input, weight, bias), normalized_shape, eps, memory_efficient
        )


class FusedRMSNormAffineFunction(NormFunction):
    """:func:`fused_rms_norm_affine`."""

    apply = staticmethod(fused_rms_norm_affine)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        weight: Tensor,
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(ctx, fused_rms_norm_affine, (input, weight), normalized_shape, eps, memory_efficient)


class FusedRMSNormFunction(NormFunction):
    """:func:`fused_rms_norm`."""

    apply = staticmethod(fused_rms_norm)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(ctx, fused_rms_norm, (input,), normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineMixedDtypesFunction(NormFunction):
    """:func:`mixed_dtype_fused_rms_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002  # apex's name
        weight: Tensor,
        normalized_shape: int | Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the output, in an autograd function's ``ctx``."""
        return NormFunction.run(
            ctx, mixed_dtype_fused_rms_norm_affine, (input, weight), normalized_shape, eps, memory_efficient
        )
