"""Operations on lists of tensors, element by element, the comparison of tensors' bytes, and the set of half dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.layouts import bytes_of
from fabricamp.ops.table import table_of

HALF_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
_SLICE: Final = 2**24
"""Bytes that are compared at once."""


@torch.no_grad()
def scale(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], multiplier: Tensor | float, limit: float | None = None
) -> None:
    """Writes ``sources * multiplier`` into ``destinations``, each value then clamped to +-``limit``.

    The arithmetic is at least fp32 for all dtypes.  A destination may be its source.  Raises :class:`ConfigError` for a ``limit``
    of complex values.
    """
    if not sources:
        return
    if limit is not None and any(map(torch.is_complex, sources)):
        raise ConfigError("complex values cannot be clamped to a limit; clip them by their norm")
    if runs_kernels(sources[0].device):
        table = table_of(sources, destinations)
        table.launch("tensors", "scale", *_factor(multiplier, table.device), -1.0 if limit is None else float(limit))
        return
    wide = [_wide(source, destination) for source, destination in zip(sources, destinations, strict=True)]
    if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
        torch._foreach_mul_(wide, multiplier)
    if limit is not None:
        torch._foreach_clamp_max_(wide, limit)
        torch._foreach_clamp_min_(wide, -limit)
    narrow = [(to, value) for to, value in zip(destinations, wide, strict=True) if to is not value]
    if narrow:
        torch._foreach_copy_([to for to, _ in narrow], [value for _, value in narrow])


@torch.no_grad()
def axpby(
    alpha: Tensor | float, x: Sequence[Tensor], beta: Tensor | float, y: Sequence[Tensor], out: Sequence[Tensor]
) -> None:
    """Writes ``alpha * x + beta * y`` into ``out``, in at least fp32 arithmetic; ``out`` may be ``x`` or ``y``."""
    if not x:
        return
    if runs_kernels(x[0].device):
        table = table_of(x, y, out)
        table.launch("sums", "axpby", *_factor(alpha, table.device), *_factor(beta, table.device))
        return
    for left, right, destination in zip(x, y, out, strict=True):
        dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
        destination.copy_(left.to(dtype) * alpha + right.to(dtype) * beta)


@torch.no_grad()
def copy_cast(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Writes each source into its destination, rounded to the destination's dtype (masters into half weights)."""
    if not sources:
        return
    if runs_kernels(sources[0].device):
        table_of(sources, destinations).launch("tensors", "scale", None, 1.0, -1.0)
    else:
        torch._foreach_copy_(list(destinations), list(sources))


@torch.no_grad()
def accumulate(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], multiplier: Tensor | float | None = None
) -> None:
    """Adds ``sources * multiplier`` (half gradients) to ``destinations`` (views of an fp32 buffer), in the destination's dtype."""
    if sources and runs_kernels(sources[0].device):
        table = table_of(sources, destinations, destinations)
        factor = _factor(1.0 if multiplier is None else multiplier, table.device)
        table.launch("sums", "axpby", *factor, None, 1.0)
        return
    for source, destination in zip(sources, destinations, strict=True):
        wide = source.to(destination.dtype)
        destination.add_(wide if multiplier is None else wide * multiplier)


@torch.no_grad()
def note_differences(sources: Sequence[Tensor], rounded: Sequence[Tensor], flags: Tensor) -> None:
    """Writes 1 into ``flags[i]`` (int32) if an element of ``rounded[i]`` is not that of ``sources[i]`` in its dtype.

    The other flags stay as they are.  A nan equals a nan.  ``flags`` may be in pinned host memory: kernels write there too.
    """
    if not sources:
        return
    if runs_kernels(sources[0].device):
        table_of(sources, rounded).launch("differences", "note_differences", flags, first_written=2)
        return
    for index, (source, one) in enumerate(zip(sources, rounded, strict=True)):
        own = source.to(one.dtype)
        flags[index] |= ((own != one) & ~(own.isnan() & one.isnan())).any().to(flags)


@torch.no_grad()
def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Returns for each of ``tensors`` whether a byte of it differs from that of ``others``, which have its form; waits once.

    All are on one device, and need no memory there but for a slice.
    """
    if not tensors:
        return []
    flags = torch.zeros(len(tensors), dtype=torch.bool, device=tensors[0].device)
    for number, (one, other) in enumerate(zip(tensors, others, strict=True)):
        for left, right in zip(bytes_of(one).split(_SLICE), bytes_of(other).split(_SLICE), strict=True):
            word = torch.int64 if _has_words(left) and _has_words(right) else torch.uint8
            flags[number].logical_or_((left.view(word) != right.view(word)).any())
    found: list[bool] = flags.tolist()
    return found


def _has_words(part: Tensor) -> bool:
    """Returns whether bytes can be looked at as words of eight, which are compared faster."""
    return part.numel() % 8 == 0 and part.data_ptr() % 8 == 0 and part.storage_offset() % 8 == 0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bytes; waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    left, right = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


def _factor(value: Tensor | float, device: torch.device) -> tuple[Tensor | None, float]:
    """Returns a factor as kernel arguments: an fp32 tensor in device memory and 1.0, or None and the number."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float32), 1.0
    return None, float(value)


def _wide(source: Tensor, destination: Tensor) -> Tensor:
    """Returns the tensor to multiply in place, filled with ``source``: the destination, or for a half one a wide copy."""
    if destination.dtype in HALF_DTYPES:
        return source.to(torch.promote_types(source.dtype, torch.float32), copy=True)
    if source is not destination:
        destination.copy_(source)
    return destination
