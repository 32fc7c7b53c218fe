"""Cuts a batch along its samples, for a micro-batch that is run in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from fabricamp._utils.containers import tensors_within, with_parts

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""The types of values that every part gets as they are."""


class NotCuttableError(ValueError):
    """A batch whose samples cannot be told apart; the text says why."""


def samples_in(batch: object, batch_size: int | None = None, others: Container[int] = ()) -> int:
    """Returns the number of samples in ``batch``: the first dimension of all its tensors.

    Raises :class:`NotCuttableError` if these differ, or are neither the loader's ``batch_size`` nor among ``others``, or if
    ``batch`` holds something that is neither a container, a tensor nor a plain value, or as many numbers as samples.
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
    samples = lengths[0]
    if batch_size is not None and samples != batch_size and samples not in others:
        raise NotCuttableError(
            f"its tensors have a first dimension of {samples}, and the loader's batch_size is {batch_size}"
        )
    _refuse_ambiguous(batch, samples)
    return samples


def cut(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Returns samples ``start`` to ``stop`` of a batch of ``samples``, in its own containers; tensors are views.

    Lists and tuples of one text a sample are cut too.  All else is in every part.
    """
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim else batch
    if _has_one_each(batch, samples):
        return batch[start:stop]
    return with_parts(batch, lambda part: cut(part, samples, start, stop))


def _has_one_each(value: Any, samples: int) -> TypeGuard[Sequence[object]]:
    """Whether ``value`` is a list of as many plain values as samples; of texts, one belongs to each."""
    is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    return is_list and len(value) == samples and next(tensors_within(value), None) is None


def _refuse_ambiguous(value: object, samples: int) -> None:
    if _has_one_each(value, samples):
        if samples > 1 and not all(isinstance(one, (str, bytes)) for one in value):
            raise NotCuttableError(
                f"it holds a {type(value).__name__} of {samples} values, as many as samples, which may be one for each or belong "
                "to all; make it a tensor, or an attribute of the module"
            )
        return
    with_parts(value, lambda part: _refuse_ambiguous(part, samples))


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
