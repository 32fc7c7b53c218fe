"""Averages tensors over the ranks, or broadcasts rank 0's, in flat buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.gradients.buckets import Bucket, Piece, plan_messages
from fabricamp.gradients.sums import RankSums

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
            known = self._plans[key] = (tuple(tensors), plan_messages(pieces, self._capacity))
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
