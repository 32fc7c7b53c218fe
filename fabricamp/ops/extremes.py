"""The largest or smallest values over ranks, in which nan wins as in ``torch.amax``: Gloo's and NCCL's MAX may lose a nan."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS: Final = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers with as many bits as the floats."""


def all_reduce_extreme(
    values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the elements' MAX or MIN over the ranks of ``group``, nan where any rank has nan; a collective.

    Floats travel as integers of the same order, in which nan is the largest for MAX and the smallest for MIN.
    """
    if not values.is_floating_point():
        reduced = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, operation, group)
        return reduced
    wide = values if values.dtype in INTEGERS else values.float()
    integers = INTEGERS[wide.dtype]
    limits = torch.iinfo(integers)
    ordered = _turned(wide.contiguous().view(integers))
    ordered.masked_fill_(wide.isnan(), limits.max if operation == dist.ReduceOp.MAX else limits.min)
    dist.all_reduce(ordered, operation, group)
    return _turned(ordered).view(wide.dtype).to(values.dtype)


def _turned(bits: Tensor) -> Tensor:
    """Returns floats' bits as integers of the floats' order, and the other way round: below 0 all bits but the sign turn."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
