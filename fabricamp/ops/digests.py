"""Digests of tensors' bits, by which two states are compared where only one of them fits into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fabricamp.ops import table as tables
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.layouts import bytes_of
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD: Final = 8
"""Bytes of a word."""
_SLICE: Final = 2**22
"""Bytes that the reference mixes at once."""
_LOW: Final = 2**32 - 1
_PLACE: Final = 0x9E3779B97F4A7C15 - 2**64
_ROW: Final = 0xD1B54A32D192ED03 - 2**64
_MIX: Final = 0xD6E8FEB86659FD93 - 2**64


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Returns 128 bits for each tensor (int64, tensors x 2, on their device) that tell its bits; waits for nothing.

    A digest depends on the bits of each element (-0 is not 0, and each nan is its own), its place in memory and the tensor's
    number.  It is a sum of integers, so neither the order of threads nor what computes it changes it.  One launch, and one
    reading of the tensors; those with gaps in memory are copied first.
    """
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    rows = list(map(bytes_of, tensors))
    found = torch.zeros(len(rows), 2, dtype=torch.int64, device=rows[0].device)
    if runs_kernels(found.device):
        table = Table([rows], device=found.device, chunk_size=_WORD * tables.CHUNK_SIZE)
        table.launch("digests", "digests", found)
        return found
    for number, row in enumerate(rows):
        for begin in range(0, len(row), _SLICE):
            found[number] += _of_slice(row[begin : begin + _SLICE], begin // _WORD, number)
    return found


def _of_slice(part: Tensor, place: int, row: int) -> Tensor:
    """Returns the two sums over the words of ``part``, which begins with word ``place`` of its tensor."""
    count = -(-len(part) // _WORD)
    padded = part.new_zeros(_WORD * count)
    padded[: len(part)] = part
    places = torch.arange(place, place + count, dtype=torch.int64, device=part.device)
    word = padded.view(torch.int64) ^ _folded(places * _PLACE + _wrapped(row * _ROW))
    word = _folded(word) * _MIX
    word = _folded(_folded(word) * _MIX)
    turned = (word << 32) | ((word >> 32) & _LOW)
    return torch.stack([word.sum(), (turned * (2 * turned + 1)).sum()])


def _folded(word: Tensor) -> Tensor:
    """Returns ``word`` with its upper half in both halves, as bits are shifted in a word without a sign."""
    return word ^ ((word >> 32) & _LOW)


def _wrapped(number: int) -> int:
    """Returns ``number`` as int64 wraps it."""
    return (number + 2**63) % 2**64 - 2**63
