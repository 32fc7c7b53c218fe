"""Buckets of gradients: the plan which tensors share a bucket and its all-reduce, and the all-reduces in flight.

The plan depends only on sizes, dtypes and devices, so all ranks agree on it.  All sums of gradients over ranks are started and
awaited by :class:`RankSums`, except those of torch's wrapper, of FSDP, and of torchft's manager (``strategies/quorum.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Piece(NamedTuple):
    """Size and ``kind`` (dtype and device) of one tensor; only pieces of one kind share a bucket."""

    elements: int
    kind: Hashable


class Bucket(NamedTuple):
    """Pieces that are exchanged as one flat tensor: their positions in the given sequence, and their lengths in elements."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The length of the flat tensor."""
        return sum(self.lengths)


def plan_messages(pieces: Sequence[Piece], elements: float, triggers: Collection[int] = ()) -> list[Bucket]:
    """Returns buckets that together hold each piece once, in the order in which they become full.

    Pieces are added in order.  A bucket is full when it holds at least ``elements`` elements.  With ``triggers`` (positions of
    pieces) it is full only when it gets one of these.  Buckets that never become full come last.

    >>> plan_messages([Piece(3, "fp32"), Piece(2, "fp16"), Piece(2, "fp32")], elements=3)
    [Bucket(indices=(0,), lengths=(3,)), Bucket(indices=(1,), lengths=(2,)), Bucket(indices=(2,), lengths=(2,))]
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    for index, piece in enumerate(pieces):
        filling.setdefault(piece.kind, []).append(index)
        held[piece.kind] = held.get(piece.kind, 0) + piece.elements
        if (index in triggers) if triggers else held[piece.kind] >= elements:
            full.append(filling.pop(piece.kind))
            del held[piece.kind]
    return [
        Bucket(tuple(indices), tuple(pieces[index].elements for index in indices))
        for indices in [*full, *filling.values()]
    ]


class RankSums:
    """All-reduces in flight, each in place; all ranks have to start the same ones in the same order."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def start(self, flat: Tensor, group: dist.ProcessGroup | None = None, *, wait: bool = False) -> None:
        """Starts the all-reduce of ``flat`` in ``group`` (None: the default group).

        ``wait``: torch's current stream (on a CPU the host) waits for the sum.
        """
        if group is None:
            group = cast("dist.ProcessGroup", dist.group.WORLD)
        options = dist.AllreduceOptions()
        options.asyncOp = not wait
        # dist.all_reduce makes the same call after checks in Python, which take some 30 us on a machine with slow cores.
        work = group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], options)
        if not wait:
            self._works.append(work)
        elif work is not None:  # the backend has not waited itself
            work.wait()

    def wait(self) -> None:
        """Makes torch's current stream (on a CPU the host) wait for all started sums."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def run(self, flats: Iterable[Tensor], *, alone: bool = False) -> None:
        """Starts the all-reduce of each of ``flats`` as soon as it is yielded, then waits for all.

        ``alone``: there is only one, so the call is synchronous.
        """
        for flat in flats:
            self.start(flat, wait=alone)
        self.wait()
