"""The non-finite tracker: maps the index of a gradient statistic back to its parameter, several steps later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp.ops.uploads import lasting_like
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.loss_scaler import SLOTS


class GradStatsRecord(NamedTuple):
    """The gradient statistics of a step; ``of`` is (tensors, number of elements of each), or None for a fused optimizer."""

    statistics: Tensor
    of: tuple[Sequence[Tensor], Sequence[int]] | None = None


class NonFiniteTracker:
    """Remembers which parameters one optimizer's statistics belong to, for the last steps.

    ``origin`` is the number of its first statistic, counted over all optimizers.
    """

    def __init__(self, optimizer: Optimizer, origin: int) -> None:
        self.origin = origin
        self._optimizer = optimizer
        self._looked: list[tuple[Sequence[Tensor], Sequence[int]] | None] = [None] * SLOTS
        self._last: Tensor | None = None
        self._slot = 0

    def widen(self, slots: int) -> None:
        """Remembers the last ``slots`` steps, as the ring buffer does."""
        self._looked = [None] * slots

    def note(self, window: int, stats_record: GradStatsRecord) -> None:
        """Records the statistics of step ``window`` and their parameters."""
        self._slot = window % len(self._looked)
        self._last, self._looked[self._slot] = stats_record

    def keep(self) -> None:
        """Copies the last statistics to memory that no other CUDA graph writes."""
        if self._last is not None:
            self._last = lasting_like(self._last).copy_(self._last)

    @property
    def stats_record(self) -> GradStatsRecord | None:
        """The last record, or None."""
        return None if self._last is None else GradStatsRecord(self._last, self._looked[self._slot])

    def target(self, index: int, slot: int) -> Tensor | None:
        """Returns the parameter of entry ``index`` of the statistics in ``slot``; None if it is not known."""
        stats_record = self._looked[slot]
        if stats_record is not None:
            place = (
                ops.place_of_statistic(stats_record[1], index, stats_record[0][0].device) if stats_record[0] else None
            )
            return None if place is None else stats_record[0][place]
        if not isinstance(self._optimizer, FusedOptimizer):  # no record: the run was resumed since
            return None
        try:
            return self._optimizer.parameter_of_statistic(index)
        except IndexError:
            return None

    def last_targets(self) -> Iterator[Tensor]:
        """Yields the parameters with non-finite gradients in the last step; waits for the device."""
        if self._last is None:
            return
        for index in cast("list[int]", torch.isfinite(self._last).logical_not_().nonzero().view(-1).tolist()):
            target = self.target(index, self._slot)
            if target is not None:
                yield target
