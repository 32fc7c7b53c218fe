"""The non-finite tracker: names the parameters with inf or nan gradients, from the index of a statistic, several steps later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp.ops.uploads import lasting_like
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.loss_scaler import SLOTS, Overflow

_MOST_NAMES: Final = 5


class GradStatsRecord(NamedTuple):
    """The gradient statistics of a step; ``of`` is (tensors, number of elements of each), or None for a fused optimizer."""

    statistics: Tensor
    of: tuple[Sequence[Tensor], Sequence[int]] | None = None


class NonFiniteTracker:
    """Remembers which parameters one optimizer's statistics belong to, for the last steps.

    ``stat_offset`` is the number of its first statistic, counted over all optimizers.
    """

    def __init__(self, optimizer: Optimizer, stat_offset: int) -> None:
        self.stat_offset = stat_offset
        self._optimizer = optimizer
        self._ring: list[tuple[Sequence[Tensor], Sequence[int]] | None] = [None] * SLOTS
        """``GradStatsRecord.of`` of the last steps, in the slots that the loss scaler's ring has for them."""
        self._last: Tensor | None = None
        """The statistics of the last step."""
        self._slot = 0

    def resize_ring(self, slots: int) -> None:
        """Remembers the last ``slots`` steps, as the loss scaler's ring does."""
        self._ring = [None] * slots

    def note(self, step: int, stats_record: GradStatsRecord) -> None:
        """Records the statistics of a step and their parameters."""
        self._slot = step % len(self._ring)
        self._last = stats_record.statistics
        self._ring[self._slot] = stats_record.of

    def keep(self) -> None:
        """Copies the last statistics to memory that no other CUDA graph writes."""
        if self._last is not None:
            self._last = lasting_like(self._last).copy_(self._last)

    @property
    def stats_record(self) -> GradStatsRecord | None:
        """The last record, or None."""
        return None if self._last is None else GradStatsRecord(self._last, self._ring[self._slot])

    def parameter(self, index: int, slot: int) -> Tensor | None:
        """Returns the updated parameter of entry ``index`` of the statistics in ``slot``; None if it is not known."""
        noted = self._ring[slot]
        if noted is not None:
            tensors, sizes = noted
            if not tensors:
                return None
            position = ops.place_of_statistic(sizes, index, tensors[0].device)
            return None if position is None else tensors[position]
        if not isinstance(self._optimizer, FusedOptimizer):  # no record: the run was resumed since
            return None
        try:
            return self._optimizer.parameter_of_statistic(index)
        except IndexError:
            return None

    def last_nonfinite(self) -> Iterator[Tensor]:
        """Yields the updated parameters with non-finite gradients in the last step; waits for the device."""
        if self._last is None:
            return
        nonfinite = torch.isfinite(self._last).logical_not_().nonzero().view(-1)
        for index in cast("list[int]", nonfinite.tolist()):
            parameter = self.parameter(index, self._slot)
            if parameter is not None:
                yield parameter


def overflow_message(overflow: Overflow, names: Sequence[str], step: int) -> str:
    """Returns a sentence that names the parameters, the ``step`` (a ``global_step``), the loss and the scale of an overflow."""
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return (
        f"the gradients{' of ' if names else ''}{shown} were not finite at step {step} (loss {overflow.loss:g}, "
        f"loss scale {overflow.scale:g})"
    )
