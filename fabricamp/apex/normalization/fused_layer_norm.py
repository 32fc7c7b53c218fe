"""The norms of apex as functions, and by the names of its autograd functions."""

from __future__ import annotations

from fabricamp.nn.norms import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

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


class FusedLayerNormAffineFunction:
    """``apply(input, weight, bias, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """``apply(input, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineMixedDtypesFunction:
    """``apply(input, weight, bias, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormAffineFunction:
    """``apply(input, weight, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    """``apply(input, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineMixedDtypesFunction:
    """``apply(input, weight, normalized_shape, eps, memory_efficient)``."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)
