"""Tensors travel between ranks in flat buckets: averaged gradients, averaged sums, rank 0's values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.strategies.buckets import Bucket, Piece, plan_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DEFAULT_BUCKET_MB", "Exchange"]

DEFAULT_BUCKET_MB = 25.0
"""torch's own bucket size."""

_MEGABYTE = 1024 * 1024
_MOST_PLANS = 64


class _Travelling(NamedTuple):
    """A bucket on its way: its flat tensor cut into one view per member, and what to wait for."""

    bucket: Bucket
    views: list[Tensor]
    flags: Tensor
    work: dist.Work


class Exchange:
    """Averages over the ranks of torch.distributed's default group, bucket by bucket, all of them under way at once.

    Like torch's DistributedDataParallel it divides before it sums, so half gradients do not overflow in the sum.
    """

    def __init__(self, world_size: int, bucket_megabytes: float) -> None:
        self._share = 1.0 / world_size
        self._capacity = int(bucket_megabytes * _MEGABYTE)
        # Holds its tensors, so that an id stands for one tensor as long as the plan exists.
        self._plans: dict[tuple[int, ...], tuple[tuple[Tensor, ...], list[Bucket]]] = {}

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Averages ``.grad`` in place; a gradient that a rank lacks counts as zeros there, one that all lack is None.

        Each parameter has its slot on every rank whatever backward reached, and one flag per parameter rides behind the
        gradients: only a rank that lacks some reads flags on the host.
        """
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} has a {parameter.grad.layout} gradient, which "
                    "manual optimization under ddp cannot exchange; build the embedding with sparse=False"
                )
        plan = self._plan(parameters)
        for travelling in [self._send_gradients(bucket, parameters) for bucket in plan]:
            _receive_gradients(travelling, parameters)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Averages ``tensors`` in place; one that fills a bucket by itself travels without being copied."""
        arrivals = [self._send(bucket, tensors) for bucket in self._plan(tensors)]
        for work, own, views in arrivals:
            work.wait()
            if views:
                torch._foreach_copy_(own, views)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites ``tensors`` with rank 0's, as bytes: any dtype."""
        for bucket in self._plan(tensors):
            own = [tensors[index] for index in bucket.indices]
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
            dist.broadcast(flat.view(torch.uint8), src=0)
            torch._foreach_copy_(own, _views(flat, own))

    def _plan(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        key = tuple(map(id, tensors))
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) == _MOST_PLANS:  # a caller that brings new tensors each time must not fill the memory
                self._plans.clear()
            pieces = [Piece(tensor.numel(), tensor.element_size(), (tensor.dtype, tensor.device)) for tensor in tensors]
            known = self._plans[key] = (tuple(tensors), plan_buckets(pieces, self._capacity))
        return known[1]

    def _send_gradients(self, bucket: Bucket, parameters: Sequence[Tensor]) -> _Travelling:
        members = [parameters[index] for index in bucket.indices]
        flat = torch.empty(bucket.elements + len(members), dtype=members[0].dtype, device=members[0].device)
        flags = flat[bucket.elements :]
        views = _views(flat[: bucket.elements], members)
        present = [member.grad is not None for member in members]
        if all(present):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(present))
            torch._foreach_zero_([view for view, here in zip(views, present, strict=True) if not here])
        gradients = [member.grad for member in members if member.grad is not None]
        if gradients:
            torch._foreach_copy_([view for view, here in zip(views, present, strict=True) if here], gradients)
        flat.mul_(self._share)
        return _Travelling(bucket, views, flags, _all_reduce(flat))

    def _send(self, bucket: Bucket, tensors: Sequence[Tensor]) -> tuple[dist.Work, list[Tensor], list[Tensor]]:
        own = [tensors[index] for index in bucket.indices]
        if len(own) == 1 and own[0].is_contiguous():
            own[0].mul_(self._share)
            return _all_reduce(own[0]), own, []
        flat = torch.cat([tensor.reshape(-1) for tensor in own]).mul_(self._share)
        return _all_reduce(flat), own, _views(flat, own)


def _receive_gradients(travelling: _Travelling, parameters: Sequence[Tensor]) -> None:
    bucket, views, flags, work = travelling
    work.wait()
    members = [parameters[index] for index in bucket.indices]
    arrived = [(member.grad, view) for member, view in zip(members, views, strict=True) if member.grad is not None]
    if arrived:
        torch._foreach_copy_([gradient for gradient, _ in arrived], [view for _, view in arrived])
    if len(arrived) == len(members):
        return
    for member, view, flag in zip(members, views, flags.tolist(), strict=True):
        if member.grad is None and flag != 0:
            member.grad = torch.empty_like(member).copy_(view)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cuts ``flat`` into tensors shaped like those given."""
    pieces = torch.split_with_sizes(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _all_reduce(flat: Tensor) -> dist.Work:
    return cast("dist.Work", dist.all_reduce(flat, async_op=True))
