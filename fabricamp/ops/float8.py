"""Casts tensors to FP8 with a scale, by one launch each."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.bridge import c_type, kernel, runs_kernels

_THREADS: Final = 256
_ELEMENTS: Final = 4 * 4 * _THREADS
"""Elements of a block."""
_ROUNDED: Final = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED: Final = 16


def to_float8(tensor: Tensor, scale: Tensor, float8: torch.dtype, rounded: torch.dtype) -> Tensor:
    """Returns ``tensor`` in the dtype ``float8``: rounded to the dtype ``rounded`` first, then times ``scale`` in fp32.

    ``scale``: one element in fp32, in a tensor of one dimension.  For values beyond the largest one of FP8 the kernel returns the
    largest one, torch NaN.

    >>> to_float8(torch.tensor([1.0, 1.1]), torch.tensor([2.0]), torch.float8_e4m3fn, torch.bfloat16).float()
    tensor([2.0000, 2.2500])
    """
    result = torch.empty_like(tensor, dtype=float8)
    elements = tensor.numel()
    source = tensor.data_ptr()
    if (
        elements == 0  # a kernel needs a block
        or not runs_kernels(tensor.device)
        or float8 is not torch.float8_e4m3fn
        or tensor.dtype is not torch.float32
        or rounded not in _ROUNDED
        or not tensor.is_contiguous()
        or (elements | source) % _ALIGNED
    ):
        # The scale has a dimension, so that the product is in fp32.
        torch.mul(tensor.to(rounded), scale, out=result)
        return result
    run = kernel("float8", "to_float8", (), tensor.device, (("ROUNDED", c_type(rounded)),))
    run.launch(-(-elements // _ELEMENTS), _THREADS, source, scale.data_ptr(), result.data_ptr(), elements)
    return result
