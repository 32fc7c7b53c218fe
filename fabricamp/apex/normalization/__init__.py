"""apex's LayerNorm and RMSNorm."""

from fabricamp.apex.normalization.fused_layer_norm import FusedLayerNorm as FusedLayerNorm
from fabricamp.apex.normalization.fused_layer_norm import FusedRMSNorm as FusedRMSNorm
from fabricamp.apex.normalization.fused_layer_norm import MixedFusedLayerNorm as MixedFusedLayerNorm
from fabricamp.apex.normalization.fused_layer_norm import MixedFusedRMSNorm as MixedFusedRMSNorm
