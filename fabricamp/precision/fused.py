"""A step of an optimizer with kernels of its own: statistics, finish, update, and no pass of ours over the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp import ops
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.optimizers.base import FusedOptimizer
    from fabricamp.precision.base import Clip

__all__ = ["FusedStep", "add_up", "flags_of"]


_FLAGS = WeakTensorKeyDictionary()


def flags_of(present: Tensor) -> list[Tensor]:
    """Cuts one flag a parameter into fp32 numbers, which fused optimizers read on the device; the same tensor's are one list."""
    flags: list[Tensor] | None = _FLAGS.get(present)
    if flags is None:
        flags = _FLAGS[present] = list(present.to(torch.float32).unbind())
    return flags


class FusedStep(NamedTuple):
    """Where a step's numbers are: ``state`` receives multiplier, norm and flag; gradients carry ``scale`` times ``divisor``.

    ``skips`` False: an overflow is not looked for, and a step is applied whatever its gradients are.  ``sticky``, ``closing`` and
    ``loss`` are those of :func:`~fabricamp.ops.finish`.
    """

    state: ops.StepState
    scale: Tensor
    divisor: float
    skips: bool
    strategy: Strategy | None = None
    origin: int = 0
    sticky: bool = False
    closing: ops.ScaleRule | None = None
    loss: Tensor | None = None

    def __call__(
        self,
        optimizer: FusedOptimizer,
        clip: Clip | None,
        *,
        gradients: Sequence[Tensor | None] | None = None,
        copies: Sequence[Tensor | None] | None = None,
        flags: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Clips and updates, or skips, all on the device; returns the statistics."""
        optimizer.gather(gradients, copies, flags)
        max_norm = clip.value if clip is not None and clip.algorithm == "norm" else None
        limit = clip.value if clip is not None and clip.algorithm == "value" else None
        if self.skips or max_norm is not None:
            statistics = optimizer.statistics(self.scale, self.divisor)
            if self.strategy is not None:
                statistics = add_up(self.strategy, statistics)
        else:
            statistics = self.scale.new_empty(0)  # nobody asks for norm or flag: the gradients are read once
        ops.finish(
            self.state,
            statistics,
            scale=self.scale,
            divisor=self.divisor,
            max_norm=max_norm,
            origin=self.origin,
            sticky=self.sticky,
            closing=self.closing,
            loss=self.loss,
        )
        optimizer.steer(self.state, limit=limit, skips=self.skips)
        optimizer.step()
        return statistics


def add_up(strategy: Strategy, statistics: Tensor) -> Tensor:
    """Returns statistics of all ranks where each has a part of the gradients; the same ones elsewhere."""
    if type(strategy).reduce_statistics is Strategy.reduce_statistics:
        return statistics
    total = statistics.sum().reshape(1)
    strategy.reduce_statistics(total)
    return total
