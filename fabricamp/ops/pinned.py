"""Host memory that kernels write to."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_kept: Final[list[Tensor]] = []


def pinned_for_kernels(*size: int, dtype: torch.dtype) -> Tensor:
    """Returns zeroed pinned memory that is never freed; meant for a few bytes.

    torch reuses a freed pinned block at once, unless one of torch's own copies still uses it.  torch does not know about kernels:
    a kernel that still runs when its owner is dropped (a fit that raised) would write into memory reused for someone's batch.
    """
    found = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
    _kept.append(found)
    return found
