"""Random bits for stochastic rounding: a function of a parameter's key, the number of its step, and an element.

No generator is drawn from, so replicas, shards of a parameter, replays of a CUDA graph and resumed runs have the same bits.  The
kernels' ``Draws`` in kernels/common.cuh computes the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fabricamp.ops.layouts import is_dense

if TYPE_CHECKING:
    from torch import Tensor

_LOW: Final = 2**32 - 1
_STEP: Final = 0x9E3779B97F4A7C15 - 2**64
_NAN: Final = 0x7FC0


class Source(NamedTuple):
    """Where a row's bits come from: the ``key`` of its parameter (int64), and the number there of the row's ``first`` element."""

    key: int
    first: int = 0


def key_of(name: str, seed: int) -> int:
    """Returns the key (int64) of the parameter ``name``."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def words(source: Source, step: Tensor, like: Tensor) -> Tensor:
    """Returns 32 bits (int64) for each element of ``like``, numbered in their order in memory."""
    low, high = _of_step(source.key, step.to(torch.int64))
    element = _numbers(like) + source.first
    word = (element & _LOW) ^ low
    word = (word + (element >> 32) * 0x85EBCA6B) & _LOW
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _LOW
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _LOW
    word = (word ^ (word >> 16)) ^ high
    word = (word * 0x297A2D39) & _LOW
    return word ^ (word >> 15)


def _of_step(key: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two words of 32 bits for a step: those of splitmix64."""
    word = key + step * _STEP
    word = (word ^ _shifted(word, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    word = (word ^ _shifted(word, 27)) * (0x94D049BB133111EB - 2**64)
    word = word ^ _shifted(word, 31)
    return word & _LOW, _shifted(word, 32)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Returns ``word`` shifted to the right as a word without a sign."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _numbers(like: Tensor) -> Tensor:
    """Returns the number of each element in memory; of a tensor with gaps, in a contiguous one."""
    numbers = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    if like.is_contiguous() or not is_dense(like):
        return numbers.view(like.shape)
    return numbers.as_strided(like.shape, like.stride())


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Returns fp32 ``values`` rounded to bf16, up in magnitude if 16 random ``bits`` are at least 65,536 less their lower half.

    The expectation is the value itself.  A nan has one form.
    """
    word = values.detach().view(torch.int32)
    upper = ((word.to(torch.int64) & _LOW) + bits) >> 16
    upper = torch.where(values.isnan(), _NAN, upper)
    return upper.to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def round_into(values: Tensor, state: Tensor, source: Source, step: Tensor, number: int, like: Tensor) -> None:
    """Rounds ``values`` into ``state`` (bf16), the moment ``number`` (0 or 1) of a parameter ``like``, after its ``step``."""
    bits = words(source, step, like)
    state.copy_(rounded(values, (bits >> 16) if number == 0 else (bits & 0xFFFF)))
