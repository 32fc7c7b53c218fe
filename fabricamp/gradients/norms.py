"""Gradient norms and histograms, computed on the gradients' device without a host read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.shards import norm_of

BINS = 64


class Histogram(NamedTuple):
    """Counts of a tensor's finite values in equal bins from ``low`` to ``high``, their sum and sum of squares; all fp64."""

    counts: Tensor
    low: Tensor
    high: Tensor
    total: Tensor
    squares: Tensor


def norms_of(gradients: Mapping[str, Tensor], order: float) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns the norm of each gradient, and the total norm (None without gradients)."""
    norms = {name: norm_of(_values(gradient), order) for name, gradient in gradients.items()}
    if not norms:
        return {}, None
    device = next(iter(norms.values())).device
    return norms, torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms.values()]), order)


@torch.no_grad()
def histogram_of(gradient: Tensor) -> Histogram:
    """Returns the histogram of a gradient, of the real and imaginary parts if it is complex; without finite values counts are 0."""
    values = _values(gradient)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.flatten().double()
    finite = values.isfinite()
    low = torch.where(finite, values, torch.inf).amin()
    high = torch.where(finite, values, -torch.inf).amax()
    width = torch.where(high > low, (high - low) / BINS, 1.0)
    values = torch.where(finite, values, low)
    bins = ((values - low) / width).nan_to_num().long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device).scatter_add_(0, bins, finite.long())
    values = values * finite
    return Histogram(counts.double(), low, low + BINS * width, values.sum(), values.square().sum())


def _values(gradient: Tensor) -> Tensor:
    """Returns the values of a dense or sparse gradient."""
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
