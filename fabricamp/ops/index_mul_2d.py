"""Multiplies rows of one matrix, selected by indices, with the rows of another."""

from __future__ import annotations

import torch
from torch import Tensor

from fabricamp.errors import ConfigError


def index_mul_2d(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    """Returns ``in1[idx1] * in2``: matrices of one floating dtype with equally long rows, and an index for each row of ``in2``.

    Gradients of ``in1`` are summed without atomics (half gradients in fp32), so that runs repeat bit for bit.  The function can
    be differentiated twice.

    >>> index_mul_2d(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(3, 2), torch.tensor([1, 0, 1]))
    tensor([[3., 4.],
            [1., 2.],
            [3., 4.]])
    """
    _check(in1, in2, idx1)
    return in1[idx1] * in2  # torch's backward of the indexing sorts the indices first


def _check(in1: Tensor, in2: Tensor, idx1: Tensor) -> None:
    if in1.dim() != 2 or in2.dim() != 2 or idx1.dim() != 1 or in1.shape[1] != in2.shape[1] or len(in2) != len(idx1):
        shapes = ", ".join(str(tuple(one.shape)) for one in (in1, in2, idx1))
        raise ConfigError(
            f"in1, in2 and idx1 of shapes {shapes}: give matrices with rows of one length, and one index for each row of in2"
        )
    if in1.dtype != in2.dtype or not in1.dtype.is_floating_point:
        raise ConfigError(f"in1 of {in1.dtype} and in2 of {in2.dtype}: give both in the same floating dtype")
    if idx1.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"idx1 of {idx1.dtype}: give indices of int64 or int32")
