"""The norms of apex as functions, and by the names of its autograd functions."""

from __future__ import annotations

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


class FusedLayerNormFunction(NormFunction):
    """:func:`fused_layer_norm`."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineMixedDtypesFunction(NormFunction):
    """:func:`mixed_dtype_fused_layer_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormAffineFunction(NormFunction):
    """:func:`fused_rms_norm_affine`."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction(NormFunction):
    """:func:`fused_rms_norm`."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineMixedDtypesFunction(NormFunction):
    """:func:`mixed_dtype_fused_rms_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)
