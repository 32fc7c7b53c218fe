"""A step of a fused optimizer: statistics, finish, update, and no other pass over the gradients."""

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
    """Returns one fp32 scalar tensor per parameter flag, for fused optimizers to read on the device; cached per tensor."""
    flags: list[Tensor] | None = _FLAGS.get(present)
    if flags is None:
        flags = _FLAGS[present] = list(present.to(torch.float32).unbind())
    return flags


class UnscaleArgs(NamedTuple):
    """The arguments of the finish kernel: it writes multiplier, norm and overflow flag to ``state``.

    The gradients are ``scale`` times ``divisor`` too large.  ``skips`` False: overflows are not checked, and the step is always
    applied.  ``origin``, ``sticky``, ``closing`` and ``loss`` are those of :func:`~fabricamp.ops.finish`.
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
        """Computes multiplier, norm and overflow flag from the statistics of all gradients."""
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
    how: UnscaleArgs | None,
    clip: Clip | None,
    *,
    gradients: Sequence[Tensor | None] | None = None,
    copies: Sequence[Tensor | None] | None = None,
    flags: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """Clips and updates, or skips, all on the device; returns the statistics.

    ``how`` None: gradients are neither unscaled nor clipped, the step is always applied, and None is returned.
    """
    optimizer.gather(gradients, copies, flags)
    if how is None:
        optimizer.steer(None)
        optimizer.step()
        return None
    max_norm, limit = limits(clip)
    asked = how.skips or max_norm is not None  # else neither norm nor flag is needed: the gradients are read once
    statistics = optimizer.statistics(how.scale, how.divisor) if asked else how.scale.new_empty(0)
    how.finish(statistics, max_norm)
    optimizer.steer(how.state, limit=limit, skips=how.skips)
    optimizer.step()
    return statistics


def limits(clip: Clip | None) -> tuple[float | None, float | None]:
    """Returns (maximal norm, maximal value) of ``clip``; None for no limit."""
    if clip is None:
        return None, None
    return (clip.value, None) if clip.algorithm == "norm" else (None, clip.value)
