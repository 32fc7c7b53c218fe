"""Starts and awaits all-reduces of flat tensors; used for all gradient sums over ranks, except those of torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import Tensor


class RankSums:
    """All-reduces in flight, each in place; all ranks have to start the same ones in the same order."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def start(self, flat: Tensor, group: dist.ProcessGroup | None = None, *, wait: bool = False) -> None:
        """Starts the all-reduce of ``flat`` in ``group`` (None: the default group); ``wait``: returns after the sum is done."""
        work = dist.all_reduce(flat, group=group, async_op=not wait)
        if not wait:
            self._works.append(cast("dist.Work", work))

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
