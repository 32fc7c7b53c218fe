"""A step of an optimizer with kernels of its own: statistics, finish, update, and no other pass over the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.optimizers.base import FusedOptimizer
    from fabricamp.precision.base import Clip


_FLAGS = WeakTensorKeyDictionary()


def flags_of(present: Tensor) -> list[Tensor]:
    """Cuts one flag per parameter into fp32 numbers, which fused optimizers read on the device; the same tensor's are one list."""
    flags: list[Tensor] | None = _FLAGS.get(present)
    if flags is None:
        flags = _FLAGS[present] = list(present.to(torch.float32).unbind())
    return flags


class StepNumbers(NamedTuple):
    """Where a step's numbers are: ``state`` receives multiplier, norm and flag; gradients carry ``scale`` times ``divisor``.

    ``skips`` False: an overflow is not looked for, and a step is applied whatever its gradients are.  ``sticky``, ``closing`` and
    ``loss`` are those of :func:`~fabricamp.ops.finish`.
    """

    state: ops.StepState
    scale: Tensor
    divisor: float
    skips: bool
    origin: int = 0
    sticky: bool = False
    closing: ops.ScaleRule | None = None
    loss: Tensor | None = None

    def finish(self, statistics: Tensor, max_norm: float | None) -> None:
        """Writes what the statistics of all gradients mean for the step."""
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


def step_fused(
    optimizer: FusedOptimizer,
    how: StepNumbers | None,
    clip: Clip | None,
    *,
    gradients: Sequence[Tensor | None] | None = None,
    copies: Sequence[Tensor | None] | None = None,
    flags: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """Clips and updates, or skips, all on the device; returns the statistics.  ``how`` None: gradients are what they are."""
    optimizer.gather(gradients, copies, flags)
    if how is None:
        optimizer.steer(None)
        optimizer.step()
        return None
    max_norm, limit = limits(clip)
    asked = how.skips or max_norm is not None  # else for neither norm nor flag: the gradients are read once
    statistics = optimizer.statistics(how.scale, how.divisor) if asked else how.scale.new_empty(0)
    how.finish(statistics, max_norm)
    optimizer.steer(how.state, limit=limit, skips=how.skips)
    optimizer.step()
    return statistics


def limits(clip: Clip | None) -> tuple[float | None, float | None]:
    """The largest norm, and the largest value, that ``clip`` allows."""
    if clip is None:
        return None, None
    return (clip.value, None) if clip.algorithm == "norm" else (None, clip.value)
