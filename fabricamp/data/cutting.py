"""Cuts a batch along its samples, for a micro-batch that is run in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fabricamp._utils.containers import tensors_within, with_parts

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""The types of values that every part gets as they are."""


class NotCuttableError(ValueError):
    """A batch whose samples cannot be told apart; the text says why."""


def samples_in(batch: object, expected: int | None = None) -> int:
    """Returns the number of samples in ``batch``: the first dimension of all its tensors.

    Raises :class:`NotCuttableError` if these differ, or differ from ``expected`` (the loader's batch size), or if ``batch`` holds
    something that is neither a container, a tensor nor a plain value.
    """
    _refuse_unknown(batch)
    tensors = [one for one in tensors_within(batch) if one.ndim]
    if any(one.is_nested or one.layout is not torch.strided for one in tensors):
        raise NotCuttableError("it holds nested or sparse tensors")
    lengths = sorted({one.shape[0] for one in tensors})
    if not lengths:
        raise NotCuttableError("it holds no tensor with samples")
    if len(lengths) > 1:
        raise NotCuttableError(
            f"its tensors have first dimensions of {', '.join(map(str, lengths))}, not one of samples"
        )
    if expected is not None and lengths[0] != expected:
        raise NotCuttableError(
            f"its tensors have a first dimension of {lengths[0]}, and the loader's batch_size is {expected}"
        )
    return lengths[0]


def cut(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Returns samples ``start`` to ``stop`` of a batch of ``samples``, in its own containers; tensors are views.

    Lists and tuples of one value a sample, without tensors, are cut too.  All else is in every part.
    """
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim else batch
    is_list = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    if is_list and len(batch) == samples and next(tensors_within(batch), None) is None:
        return batch[start:stop]
    return with_parts(batch, lambda part: cut(part, samples, start, stop))


def _refuse_unknown(value: object) -> None:
    if isinstance(value, (Tensor, *_PLAIN)):
        return
    if isinstance(value, Mapping):
        parts: list[object] = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, one.name, None) for one in dataclasses.fields(value)]
    else:
        raise NotCuttableError(f"it holds a {type(value).__name__}, which has no samples to cut between")
    for part in parts:
        _refuse_unknown(part)
