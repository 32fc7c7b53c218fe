"""apex's helpers for collectives on many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fabricamp.apex._extensions.apex_C import flatten, unflatten


def import_flatten_impl() -> None:
    """Does nothing: the one ``flatten`` is imported already."""


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: tuple[Any, ...] | None = None
) -> None:
    """Runs ``call``, such as ``dist.all_reduce`` (averages here) or ``dist.broadcast``, once on all tensors of ``bucket``.

    The tensors have to have one dtype; they are concatenated for the call.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, piece in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(piece)


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: tuple[Any, ...] | None = None
) -> None:
    """Runs ``call`` once for each dtype in ``tensors``, on the concatenated tensors of this dtype."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Returns the tensors grouped by the name of their type (``"torch.HalfTensor"``), in order."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(str(tensor.type()), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns one list of tensors for each dtype that occurs."""
    return list(split_by_type(tensors).values())


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Appends the tensors in ``maybe_tensor``, a tensor or nested iterables of tensors, to ``tensor_list``."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    try:
        entries = iter(maybe_tensor)
    except TypeError:
        return
    for entry in entries:
        extract_tensors(entry, tensor_list)
