"""Lets the ranks of a run capture at the same batch: the eager step that a replay is compared with exchanges gradients too."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fabricamp.engine.graph.window import Role
    from fabricamp.strategies.base import Strategy

_PATIENCE = 8
"""How many times the batches of a warm-up and of a window ranks ask each other, where they see other shapes than each other."""


class Stage(IntEnum):
    """What a rank is about to do with a batch."""

    EAGER = 0
    READY = 1
    """It may be captured now."""
    REPLAY = 2


class Together:
    """Lets ranks agree on their first captures; from then on each captures by itself, compares nothing, and asks nobody.

    A capture launches nothing, and a replay exchanges what an eager step does: ranks may do either.
    """

    def __init__(self, strategy: Strategy, warmup: int) -> None:
        self._strategy = strategy
        self.alone = strategy.world_size == 1
        self.settled = self.alone
        """Whether ranks do not ask each other any more."""
        self._warmup = warmup
        self._meetings = self._replays = 0
        self._batches: Counter[Role] = Counter()

    def meet(self, stage: Stage, accumulate: int) -> bool:
        """Tells the other ranks what this one is about to do; returns whether all are ready to capture.  Waits for the device."""
        stages = self._strategy.all_gather(torch.tensor(stage, dtype=torch.int64, device="cpu")).tolist()
        self._replays = self._replays + 1 if all(one == Stage.REPLAY for one in stages) else 0
        self._meetings += 1
        patience = _PATIENCE * (self._warmup + (1 + self._strategy.eager_steps) * accumulate)
        self.settled = self._replays > accumulate or self._meetings >= patience
        return all(one == Stage.READY for one in stages)

    def checks(self, every: int, role: Role, *, replays: bool) -> bool:
        """Returns whether a replay is due to be compared: every so many micro-batches of a role, where all ranks replay them."""
        if not self.settled:
            return False
        self._batches[role] += 1
        return self._batches[role] % every == 0 and self.all(replays)

    def all(self, flag: bool) -> bool:
        """Returns whether ``flag`` is set on every rank."""
        return flag if self.alone else self._strategy.reduce_boolean_decision(flag)
