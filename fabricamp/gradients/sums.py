"""Starts and awaits all-reduces of flat tensors: every sum of gradients over the ranks, but for torch's own wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import Tensor


class RankSums:
    """Sums over the ranks that are under way, each in place; all ranks start the same ones, in the same order."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def start(self, flat: Tensor, group: dist.ProcessGroup | None = None, *, wait: bool = False) -> None:
        """Sends ``flat`` off, through ``group`` (None: the default one); ``wait``: it is summed when this returns."""
        work = dist.all_reduce(flat, group=group, async_op=not wait)
        if not wait:
            self._works.append(cast("dist.Work", work))

    def wait(self) -> None:
        """Makes torch's current stream (on a CPU the host) wait for all that were started."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def run(self, flats: Iterable[Tensor], *, alone: bool = False) -> None:
        """Starts all ``flats``, each as soon as it is made, and waits; ``alone``: there is one, and nothing to do meanwhile."""
        for flat in flats:
            self.start(flat, wait=alone)
        self.wait()
