"""Shared code of the functions of ``amp_C``: checks of tensor lists, the flag, fp32 arithmetic for fp64 tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.layouts import is_dense

Lists = list[list[Tensor]]
_FLOATING: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class TensorListError(ConfigError, RuntimeError):
    """A function of ``amp_C`` cannot take these lists of tensors; this error is a ``RuntimeError`` too, as in apex."""


def checked(name: str, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *depths: int) -> Lists:
    """Returns the lists; raises :class:`TensorListError` unless their number is in ``depths`` and their tensors match."""
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) not in depths:
        wanted = " or ".join(map(str, depths))
        raise TensorListError(f"{name} takes {wanted} lists of tensors, and got {len(lists)}")
    lengths = [len(tensors) for tensors in lists]
    if not lengths[0]:
        raise TensorListError(f"{name} got an empty list of tensors; give at least one, or do not call it")
    if len(set(lengths)) > 1:
        raise TensorListError(f"{name} got lists of different lengths ({', '.join(map(str, lengths))})")
    device = lists[0][0].device
    for number, tensors in enumerate(lists):
        for index, tensor in enumerate(tensors):
            obstacle = _obstacle(tensor, lists[0][index], device)
            if obstacle is not None:
                raise TensorListError(f"{name}: tensor {index} of list {number} {obstacle}")
    if noop_flag.device != device or noop_flag.numel() != 1:
        raise TensorListError(
            f"{name}: the flag is a tensor of {noop_flag.numel()} elements on {noop_flag.device}; give one int32 on {device}"
        )
    return lists


def _obstacle(tensor: Tensor, first: Tensor, device: torch.device) -> str | None:
    """Returns why ``tensor`` does not match ``first``, the tensor of list 0 at the same index; None if it does."""
    if tensor.device != device:
        return f"is not on the same device as the first one ({tensor.device}, {device})"
    if tensor.numel() != first.numel():
        return f"has {tensor.numel()} elements, that of the first list {first.numel()}"
    if tensor.dtype not in _FLOATING:
        return f"is of {tensor.dtype}; it has to be fp32, fp16, bf16 or fp64"
    if not is_dense(tensor):
        return "is neither contiguous nor channels last"
    return None


def flag_where_not_finite(noop_flag: Tensor, *lists: Sequence[Tensor]) -> None:
    """Sets the flag if a tensor holds inf or nan; the host reads nothing."""
    same: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (one for tensors in lists for one in tensors if one.numel() > 0):
        same.setdefault(tensor.dtype, []).append(tensor)
    for tensors in same.values():
        largest = torch.stack(list(torch._foreach_norm(tensors, torch.inf)))  # nan if the tensor holds a nan
        noop_flag.logical_or_(torch.isfinite(largest).all().logical_not_())


def verdict(noop_flag: Tensor, multiplier: Tensor | float = 1.0) -> ops.StepState:
    """Returns a StepState that makes an op skip if the flag is set, and multiply gradients by ``multiplier``."""
    state = ops.StepState.on(noop_flag.device)
    state.found_inf.copy_(noop_flag.reshape(()) != 0)
    if isinstance(multiplier, Tensor):
        state.multiplier.copy_(multiplier.reshape(()))
    else:
        state.multiplier.fill_(multiplier)
    return state


def numbers(value: Tensor | float, count: int, device: torch.device) -> list[Tensor]:
    """Returns ``count`` 0-dim fp32 tensors with ``value`` on ``device``."""
    if isinstance(value, Tensor):
        return list(value.reshape(1).to(device, torch.float32).repeat(count).unbind())
    return list(torch.full((count,), float(value), dtype=torch.float32, device=device).unbind())


@contextlib.contextmanager
def in_fp32(lists: Lists) -> Iterator[Lists]:
    """Yields the lists with fp32 copies in place of fp64 tensors, and writes the copies back at exit: apex's rule for fp64."""
    narrow = [[one.float() if one.dtype is torch.float64 else one for one in tensors] for tensors in lists]
    yield narrow
    for tensors, copies in zip(lists, narrow, strict=True):
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor is not copy:
                tensor.copy_(copy)
