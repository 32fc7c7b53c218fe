"""Makes the ranks agree on their first captures: the first replay is compared with an eager step, which exchanges gradients."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fabricamp.engine.graph.batches import Role
    from fabricamp.strategies.base import Strategy

_PATIENCE = 8
"""Limit of the agreement, in multiples of a warm-up's and an accumulation's batches: ranks may never see the same shapes."""


class Stage(IntEnum):
    """How a rank is about to run a batch."""

    EAGER = 0
    READY = 1
    """The batch may be captured now."""
    REPLAY = 2


class CaptureConsensus:
    """Agrees with the other ranks on the first captures; later each rank captures alone, without comparison or communication.

    A capture launches nothing, and a replay exchanges the same as an eager step, so each rank may choose between these.
    """

    def __init__(self, strategy: Strategy, warmup: int) -> None:
        self._strategy = strategy
        self.alone = strategy.world_size == 1
        self.ended = self.alone
        """Whether the agreement has ended: the ranks no longer exchange their stages."""
        self._warmup = warmup
        self._exchanges = 0
        self._replays_in_a_row = 0
        self._batches_by_role: Counter[Role] = Counter()

    def all_ready(self, stage: Stage, accumulate: int) -> bool:
        """Exchanges the ranks' stages; returns whether all ranks are ready to capture.  Waits for the device."""
        stages = self._strategy.all_gather(torch.tensor(stage, dtype=torch.int64, device="cpu")).tolist()
        if all(one == Stage.REPLAY for one in stages):
            self._replays_in_a_row += 1
        else:
            self._replays_in_a_row = 0
        self._exchanges += 1
        # Done once all ranks have replayed an accumulation: its graphs are captured, and their first replays compared.
        patience = _PATIENCE * (self._warmup + (1 + self._strategy.eager_steps) * accumulate)
        self.ended = self._replays_in_a_row > accumulate or self._exchanges >= patience
        return all(one == Stage.READY for one in stages)

    def should_check(self, every: int, role: Role, *, replays: bool) -> bool:
        """Returns whether to compare this replay: every ``every`` micro-batches of a role, if all ranks replay that one."""
        if not self.ended:
            return False
        self._batches_by_role[role] += 1
        return self._batches_by_role[role] % every == 0 and self.all(replays)

    def all(self, flag: bool) -> bool:
        """Returns whether ``flag`` is set on every rank."""
        return flag if self.alone else self._strategy.reduce_boolean_decision(flag)
