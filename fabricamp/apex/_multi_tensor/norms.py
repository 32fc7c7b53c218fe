"""The norms of ``amp_C``."""

from __future__ import annotations

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex._multi_tensor.lists import checked


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors (one fp32) and, with ``per_tensor``, of each; sets the flag if the norm is not finite."""
    (tensors,) = checked("multi_tensor_l2norm", noop_flag, tensor_lists, 1)
    norm, each = ops.l2norm(tensors)
    noop_flag.logical_or_(torch.isfinite(norm).logical_not_())
    return norm.reshape(1), each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the same as :func:`multi_tensor_l2norm`, but zeros if the flag is set already."""
    skipped = noop_flag.reshape(()) != 0
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return norm.masked_fill(skipped, 0.0), each.masked_fill(skipped, 0.0)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes list 0 times ``scale`` into list 1, and returns the norms of list 0; sets the flag if they are not finite."""
    sources, destinations = checked("multi_tensor_l2norm_scale", noop_flag, tensor_lists, 2)
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [sources], per_tensor)
    ops.scale(sources, destinations, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norms of the tensors times ``inv_scale``; sets the flag if the norms of the tensors are not finite."""
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = inv_scale.reshape(1).to(norm)
    return norm * factor, each * factor
