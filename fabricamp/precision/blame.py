"""Finds the parameter whose gradient was not finite: from the index of a gradient statistic back to it, windows later."""

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


class Looked(NamedTuple):
    """The statistics that a step took, ``of`` the gradients of these tensors with so many elements; None: a fused optimizer's."""

    statistics: Tensor
    of: tuple[Sequence[Tensor], Sequence[int]] | None = None


class Blame:
    """What the statistics of one optimizer were taken of in the last windows.

    ``origin`` is the number that its first statistic has among those of all optimizers.
    """

    def __init__(self, optimizer: Optimizer, origin: int) -> None:
        self.origin = origin
        self._optimizer = optimizer
        self._looked: list[tuple[Sequence[Tensor], Sequence[int]] | None] = [None] * SLOTS
        self._last: Tensor | None = None
        self._slot = 0

    def widen(self, slots: int) -> None:
        """Remembers so many windows, as the ring has slots."""
        self._looked = [None] * slots

    def note(self, window: int, looked: Looked) -> None:
        """Remembers what the statistics of the window with that number are of."""
        self._slot = window % len(self._looked)
        self._last, self._looked[self._slot] = looked

    def keep(self) -> None:
        """Copies the last statistics to memory that no CUDA graph writes to by itself."""
        if self._last is not None:
            self._last = lasting_like(self._last).copy_(self._last)

    @property
    def looked(self) -> Looked | None:
        """What was noted last."""
        return None if self._last is None else Looked(self._last, self._looked[self._slot])

    def target(self, index: int, slot: int) -> Tensor | None:
        """Returns what entry ``index`` of the statistics noted for ``slot`` belongs to; None where that is not known."""
        looked = self._looked[slot]
        if looked is not None:
            place = ops.place_of_statistic(looked[1], index, looked[0][0].device) if looked[0] else None
            return None if place is None else looked[0][place]
        if not isinstance(self._optimizer, FusedOptimizer):  # nothing noted: the run was resumed since
            return None
        try:
            return self._optimizer.parameter_of_statistic(index)
        except IndexError:
            return None

    def last_targets(self) -> Iterator[Tensor]:
        """Yields what had non-finite gradients in the last window; waits for the device."""
        if self._last is None:
            return
        for index in cast("list[int]", torch.isfinite(self._last).logical_not_().nonzero().view(-1).tolist()):
            target = self.target(index, self._slot)
            if target is not None:
                yield target
