"""Averages tensors over the ranks, or broadcasts rank 0's, in flat buckets.

After :class:`Exchange` come the checks of the options that the strategy ``delayed_ddp`` and apex's wrapper share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fabricamp.arguments.checks import check_flag
from fabricamp.errors import ConfigError, nearest
from fabricamp.gradients.buckets import Bucket, Piece, RankSums, plan_messages
from fabricamp.gradients.flat import Transport

DEFAULT_BUCKET_MB = 25.0
"""torch's own bucket size."""

_MOST_PLANS = 64


def elements_of(megabytes: float) -> int:
    """Returns the number of fp32 elements in ``megabytes``, at least 1."""
    return max(int(megabytes * 1024 * 1024) // 4, 1)


class Exchange:
    """Averages tensors over the ranks of torch.distributed's default group, in buckets with concurrent all-reduces.

    Like torch's DistributedDataParallel it divides before the sum, so half gradients do not overflow in the sum.
    """

    def __init__(self, world_size: int, bucket_megabytes: float) -> None:
        self._share = 1.0 / world_size
        self._capacity = elements_of(bucket_megabytes)
        # A plan holds its tensors, so the ids in its key stay valid.
        self._plans: dict[tuple[int, ...], tuple[tuple[Tensor, ...], list[Bucket]]] = {}

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Averages ``tensors`` in place; a contiguous tensor that is alone in its bucket is not copied."""
        buckets = [[tensors[index] for index in bucket.indices] for bucket in self._plan(tensors)]
        flats: list[Tensor] = []
        RankSums().run(self._share_of(own, flats) for own in buckets)
        for flat, own in zip(flats, buckets, strict=True):
            if flat is not own[0]:
                torch._foreach_copy_(own, _views(flat, own))

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites ``tensors`` with rank 0's, sent as bytes, so any dtype works."""
        for bucket in self._plan(tensors):
            own = [tensors[index] for index in bucket.indices]
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
            dist.broadcast(flat.view(torch.uint8), src=0)
            torch._foreach_copy_(own, _views(flat, own))

    def _plan(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        key = tuple(map(id, tensors))
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) == _MOST_PLANS:  # a caller with new tensors each time must not fill the memory
                self._plans.clear()
            pieces = [Piece(tensor.numel(), (tensor.dtype, tensor.device)) for tensor in tensors]
            known = (tuple(tensors), plan_messages(pieces, self._capacity))
            self._plans[key] = known
        return known[1]

    def _share_of(self, own: Sequence[Tensor], flats: list[Tensor]) -> Tensor:
        """Returns this rank's share of a bucket's average as one flat tensor, and appends it to ``flats``."""
        alone = len(own) == 1 and own[0].is_contiguous()
        flat = own[0] if alone else torch.cat([tensor.reshape(-1) for tensor in own])
        flats.append(flat.mul_(self._share))
        return flat


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``flat`` in the shapes of ``like``."""
    pieces = torch.split_with_sizes(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def marked(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context that profilers show as ``name``: an NVTX range on a GPU, else a range of torch's profiler."""
    if device.type == "cuda":
        return cast("AbstractContextManager[object]", torch.cuda.nvtx.range(name))
    return torch.profiler.record_function(name)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def checked_transport(dtype: object, *, always_fp32: object, average: object, predivide: object) -> Transport:
    """Returns the transport (dtype and division) of gradients; raises :class:`ConfigError` for wrong options."""
    checked_fp32: bool = check_flag("allreduce_always_fp32", always_fp32)
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype in _DTYPES)):
        raise ConfigError(
            f"allreduce_dtype={dtype!r} has to be torch.float16, torch.bfloat16, torch.float32, or None for the gradients' own"
        )
    if checked_fp32 and dtype not in (None, torch.float32):
        raise ConfigError(
            f"allreduce_always_fp32=True and allreduce_dtype={dtype} contradict each other; leave one out"
        )
    if not (predivide is None or (_is_number(predivide) and 0 < predivide < math.inf)):
        raise ConfigError(
            f"gradient_predivide_factor={predivide!r} has to be a number above 0, or None for the whole average"
        )
    return Transport(
        dtype=dtype,
        always_fp32=checked_fp32,
        average=check_flag("gradient_average", average),
        predivide=None if predivide is None else float(predivide),
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_triggers(triggers: object) -> list[Tensor | str]:
    """Returns parameters, or names of parameters, as a list; raises :class:`ConfigError` for an empty or wrong one."""
    if triggers is None:
        return []
    if isinstance(triggers, Sequence) and not isinstance(triggers, str):
        given = list(triggers)
        if given and all(isinstance(trigger, (str, Tensor)) for trigger in given):
            return given
    raise ConfigError(
        "allreduce_trigger_params has to be a list of parameters or of their names, and not empty; leave it out to go by size"
    )


def checked_communicators(
    communicators: object, num_streams: int
) -> tuple[list[ProcessGroup], list[torch.cuda.Stream]] | None:
    """Returns (groups, streams) of ``num_streams`` entries each; raises :class:`ConfigError` for other values."""
    if communicators is None:
        return None
    if isinstance(communicators, Sequence) and len(communicators) == 2:
        groups = list(communicators[0])
        streams = list(communicators[1])
        if len(groups) == len(streams) == num_streams:
            return groups, streams
    raise ConfigError(
        f"allreduce_communicators has to be (process groups, streams), with num_allreduce_streams={num_streams} of each (None as "
        "stream on CPUs)"
    )


def indices_of_triggers(triggers: Sequence[Tensor | str], module: nn.Module, parameters: Sequence[Tensor]) -> list[int]:
    """Returns the positions of ``triggers`` in ``parameters``, without those that are not in it.

    Raises :class:`ConfigError` for names and tensors that are no parameters of ``module``.
    """
    named = dict(module.named_parameters())
    for trigger in triggers:
        if isinstance(trigger, str) and trigger not in named:
            raise ConfigError(
                f"allreduce_trigger_params names {trigger!r}, which {type(module).__name__} lacks{nearest(trigger, named)}"
            )
    wanted = {id(named[trigger] if isinstance(trigger, str) else trigger) for trigger in triggers}
    known = set(map(id, named.values()))
    if not wanted <= known:
        raise ConfigError(f"allreduce_trigger_params has a tensor that is not a parameter of {type(module).__name__}")
    return [index for index, parameter in enumerate(parameters) if id(parameter) in wanted]
