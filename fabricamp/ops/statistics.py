"""Sums over gradients: the torch references.

A non-finite value makes a sum non-finite, so one pass is norm and overflow check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["gradient_statistics", "l2norm"]


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors together (0-dim) and of each one (1-dim), summed and kept in fp32."""
    if not tensors:
        return torch.zeros(()), torch.zeros(0)
    each = torch.stack(_norms(tensors))
    return torch.linalg.vector_norm(each), each


@torch.no_grad()
def gradient_statistics(gradients: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """Returns the sum of squares of ``gradients * inverse_scale`` (one fp32 element, on ``inverse_scale``'s device).

    Ranks that each hold a part of the gradients add theirs up before :func:`~fabricamp.ops.finish`.
    """
    if not gradients:
        return torch.zeros(1, device=inverse_scale.device)
    norms = torch.stack(_norms(gradients)) * inverse_scale
    return norms.square_().sum().reshape(1)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One fp32 norm a tensor, in order; fp64 tensors are summed in fp64 first."""
    narrow = [tensor for tensor in tensors if tensor.dtype is not torch.float64]
    norms = iter(torch._foreach_norm(narrow, 2, dtype=torch.float32) if narrow else ())
    return [
        torch.linalg.vector_norm(tensor).float() if tensor.dtype is torch.float64 else next(norms) for tensor in tensors
    ]
