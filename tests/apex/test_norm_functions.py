"""The functions of apex.normalization, beside torch's."""

from __future__ import annotations

import torch
from torch import nn

from fabricamp.apex.normalization import fused_layer_norm as norms


def test_apex_functions_and_their_defaults():
    x, weight, bias = torch.randn(3, 8) * 1e-3, torch.rand(8) + 0.5, torch.randn(8)
    layer = nn.functional.layer_norm(x, (8,), weight, bias, 1e-6)
    rms = nn.functional.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(norms.fused_layer_norm_affine(x, weight, bias, (8,)), layer)
    torch.testing.assert_close(norms.fused_layer_norm(x, (8,)), nn.functional.layer_norm(x, (8,), eps=1e-6))
    torch.testing.assert_close(norms.fused_rms_norm_affine(x, weight, 8), rms)
    torch.testing.assert_close(norms.fused_rms_norm(x, 8), nn.functional.rms_norm(x, (8,), eps=1e-6))
    torch.testing.assert_close(norms.manual_rms_norm(x, 8, weight, 1e-6), rms)
    torch.testing.assert_close(
        norms.mixed_dtype_fused_layer_norm_affine(x.half(), weight, bias, 8), layer, atol=5e-3, rtol=0
    )
    torch.testing.assert_close(norms.mixed_dtype_fused_rms_norm_affine(x.half(), weight, 8), rms, atol=5e-3, rtol=0)
    assert norms.mixed_dtype_fused_layer_norm_affine(x, weight.half(), bias.half(), 8).dtype == torch.float16
    assert norms.manual_rms_norm(x, 8, weight.half(), 1e-6).dtype == torch.float16
