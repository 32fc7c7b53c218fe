"""Methods of ``torch.Tensor`` that O1 casts."""

from __future__ import annotations

import torch

from fabricamp.apex.amp.lists import torch_overrides

MODULE = torch.Tensor


def _methods(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(torch.Tensor, name)]


FP16_FUNCS = ["__matmul__", *_methods(torch_overrides.FP16_FUNCS)]

FP32_FUNCS = ["__ipow__", "__pow__", "__rpow__", "cpu", *_methods(torch_overrides.FP32_FUNCS)]

CASTS = [
    *("__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__", "__isub__"),
    *("__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__", "__rmul__", "__rsub__"),
    *("__rtruediv__", "__sub__", "__truediv__", *_methods(torch_overrides.CASTS)),
]
