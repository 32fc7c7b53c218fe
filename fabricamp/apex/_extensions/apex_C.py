"""``apex_C``: concatenates tensors into one flat tensor, and splits it again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, cat


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a 1-dim tensor with the elements of ``tensors`` in order; they have to have one dtype."""
    return cat([tensor.contiguous().view(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``flat`` with the shapes of ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
