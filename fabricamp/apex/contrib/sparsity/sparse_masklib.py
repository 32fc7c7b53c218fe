"""Masks that keep the two largest of every four weights along the input channels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fabricamp.errors import ConfigError, nearest

_PATTERN: Final = "m4n2_1d"


def create_mask(tensor: Tensor, pattern: str = _PATTERN, density: float = 0.5) -> Tensor:
    """Returns a mask of ``tensor``'s shape and dtype: 1 for the two largest magnitudes of every four input channels, else 0.

    Input channels are dimension 1 (dimension 0 of a 1-dim tensor).  ``pattern`` has to be ``"m4n2_1d"``.

    >>> create_mask(torch.tensor([[1.0, -4.0, 3.0, 2.0]]))
    tensor([[0., 1., 1., 0.]])
    """
    if pattern != _PATTERN or density != 0.5:
        raise ConfigError(
            f"create_mask got pattern={pattern!r}, density={density!r}{nearest(pattern, [_PATTERN])}; it "
            f"supports {_PATTERN!r} with density 0.5"
        )
    if tensor.dim() == 0:
        raise ConfigError("create_mask got a tensor without dimensions; it prunes weights of layers")
    channel = min(1, tensor.dim() - 1)
    rows = tensor.detach().abs().movedim(channel, -1)
    width = rows.shape[-1]
    fours = F.pad(rows.float(), (0, -width % 4), value=-1.0).unflatten(-1, (-1, 4))
    places = fours.topk(2, dim=-1).indices
    mask = torch.zeros_like(fours).scatter_(-1, places, 1.0).flatten(-2)[..., :width]
    return mask.movedim(-1, channel).to(tensor.dtype).contiguous()
