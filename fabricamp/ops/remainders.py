"""A bf16 weight and the 16 bits that it lacks: together an fp32 value, in four bytes in place of six.

The weight is the value rounded to nearest, ties up in magnitude; the remainder, an int16, is what the rounding has left of the
value's bits, from -0x8000 to 0x7fff.  So every value but nan, which has one form here, comes back with all its bits.  (If ties were
rounded to even, half of them would have a remainder of 0x8000, which an int16 cannot hold.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

import torch

from fabricamp.ops.reference import rounded, widened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DTYPE: Final = torch.int16
_NAN: Final = 0x7FC0


def is_remainder(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` holds remainders, and not rounded values."""
    return tensor is not None and tensor.dtype is DTYPE


def _has_remainders(copies: Sequence[Tensor | None] | None) -> TypeGuard[Sequence[Tensor | None]]:
    return copies is not None and DTYPE in {copy.dtype for copy in copies if copy is not None}


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 values of ``weight`` (bf16) and ``remainder`` (int16).

    An edited weight has the remainder of another value: the sum is then half a unit in the last place of bf16 away at most.
    """
    upper = weight.detach().view(DTYPE).int() << 16
    bits = upper + remainder
    # Zero with a negative remainder, which no value leaves, would carry into the sign.
    return torch.where((bits ^ upper) < 0, upper, bits).view(torch.float32)


def parted(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight (bf16) and the remainder (int16) of fp32 values."""
    bits = value.detach().view(torch.int32)
    upper = (bits >> 16) + ((bits >> 15) & 1)
    left = bits - (upper << 16)
    lost = value.isnan()  # a carry could make nan an infinity, or zero
    upper = torch.where(lost, _NAN, upper)
    return upper.to(DTYPE).view(torch.bfloat16), left.masked_fill_(lost, 0).to(DTYPE)


@torch.no_grad()
def part_into(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Writes fp32 values, on any device, into ``weight`` and ``remainder``."""
    own_weight, own_remainder = parted(value.to(weight.device, torch.float32))
    weight.copy_(own_weight)
    remainder.copy_(own_remainder)


def wide_values(parameters: Sequence[Tensor], copies: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Returns what an update computes with: the values of parameters with a remainder in ``copies``, else as :func:`widened`."""
    if not _has_remainders(copies):
        return widened(parameters)
    pairs = zip(parameters, copies, strict=True)
    return [
        joined(parameter, copy) if copy is not None and is_remainder(copy) else widened((parameter,))[0]
        for parameter, copy in pairs
    ]


def write_values(
    values: Sequence[Tensor], parameters: Sequence[Tensor], copies: Sequence[Tensor | None] | None
) -> None:
    """Writes what :func:`wide_values` returned into parameters and copies, each as it holds it."""
    if not _has_remainders(copies):
        rounded(values, parameters)
        if copies is not None:
            rounded(values, copies)
        return
    for value, parameter, copy in zip(values, parameters, copies, strict=True):
        if copy is not None and is_remainder(copy):
            part_into(value, parameter, copy)
        else:
            rounded([value], [parameter])
            rounded([value], [copy])
