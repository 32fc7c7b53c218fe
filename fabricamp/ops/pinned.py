"""Host memory that kernels write."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_kept: Final[list[Tensor]] = []


def pinned_for_kernels(*size: int, dtype: torch.dtype) -> Tensor:
    """Returns zeroed pinned memory, some bytes for good.

    torch lends a pinned block that was freed again at once, but for copies of its own: it knows nothing of kernels, and one that is
    under way when its owner is given up (a fit that raised) would write into somebody's batch.
    """
    found = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
    _kept.append(found)
    return found
