"""The non-finite tracker: names the parameters with inf or nan gradients, from the index of a statistic, several steps later."""

from __future__ import annotations

from collections.abc import Sequence
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


class _Noted(NamedTuple):
    """A step's record; ``replayed``: a CUDA graph took the statistics, and its next replay overwrites them."""

    step: int
    record: GradStatsRecord
    replayed: bool


class NonFiniteTracker:
    """Remembers which parameters one optimizer's statistics belong to, for the last steps.

    ``stat_offset`` is the number of its first statistic, counted over all optimizers.
    """

    def __init__(self, optimizer: Optimizer, stat_offset: int) -> None:
        self.stat_offset = stat_offset
        self._optimizer = optimizer
        self._ring: list[_Noted | None] = [None] * SLOTS
        """The records of the last steps, in the slots that the loss scaler's ring has for them."""
        self._last: _Noted | None = None

    def resize_ring(self, slots: int) -> None:
        """Remembers the last ``slots`` steps, as the loss scaler's ring does."""
        self._ring = [None] * slots

    def note(self, step: int, stats_record: GradStatsRecord, *, replayed: bool = False) -> None:
        """Records the statistics of a step and their parameters."""
        self._last = _Noted(step, stats_record, replayed)
        self._ring[step % len(self._ring)] = self._last

    def keep(self) -> None:
        """Copies the last statistics to memory that no other CUDA graph writes."""
        if self._last is None:
            return
        step, record, replayed = self._last
        lasting = lasting_like(record.statistics).copy_(record.statistics)
        self.note(step, record._replace(statistics=lasting), replayed=replayed)

    @property
    def stats_record(self) -> GradStatsRecord | None:
        """The last record, or None."""
        return None if self._last is None else self._last.record

    def parameter(self, index: int, slot: int) -> Tensor | None:
        """Returns the updated parameter of entry ``index`` of the statistics in ``slot``; None if it is not known."""
        noted = self._ring[slot]
        if noted is not None and noted.record.of is not None:
            tensors, sizes = noted.record.of
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

    def nonfinite_at(self, step: int) -> list[Tensor] | None:
        """Returns the updated parameters with non-finite gradients in ``step``; waits for the device.

        Returns None if the statistics of that step were overwritten, and an empty list if the optimizer made no update in it.
        """
        slot = step % len(self._ring)
        noted = self._ring[slot]
        if noted is None or noted.step != step:
            return []
        if self._is_overwritten(noted):
            return None
        nonfinite = torch.isfinite(noted.record.statistics).logical_not_().nonzero().view(-1)
        found = (self.parameter(index, slot) for index in cast("list[int]", nonfinite.tolist()))
        return [parameter for parameter in found if parameter is not None]

    def _is_overwritten(self, noted: _Noted) -> bool:
        """Returns whether a later step wrote, or a replay in progress may write, its statistics to the same memory."""
        if noted is self._last:
            return False
        memory = noted.record.statistics.data_ptr()
        later = [other for other in self._ring if other is not None and other.step > noted.step]
        return noted.replayed or any(other.record.statistics.data_ptr() == memory for other in later)


def overflow_message(overflow: Overflow, names: Sequence[str], step: int, *, complete: bool) -> str:
    """Returns a sentence that names the parameters, the ``step`` (a ``global_step``), the loss and the scale of an overflow.

    ``complete``: whether ``names`` has all parameters of that step.
    """
    shown = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown += f" and {len(names) - _MOST_NAMES} more"
    subject = f"the gradients of {shown}" if names else "the gradients"
    others = "" if complete or not names else "; it is not known if others were not finite too"
    return f"{subject} were not finite at step {step} (loss {overflow.loss:g}, loss scale {overflow.scale:g}{others})"
