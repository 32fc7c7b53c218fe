"""Gradient clipping and unscaling as one multiplier, and the update of the loss scale: on the device, without a host read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fabricamp.ops.bridge import kernel, runs_kernels, structure

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.ops.step_state import StepState

_NORM_EPSILON = 1e-6  # the same as in torch's clip_grad_norm_
_Struct = structure("finish.cu", "Rule")


@dataclass(kw_only=True, eq=False)
class ScaleRule:
    """How a training step ends: how the loss scale changes, and where the step status is recorded.

    An overflow decrements the ``hysteresis`` of the :class:`StepState`; at 0 the scale is multiplied by ``backoff_factor``, never
    below ``minimum``.  After ``growth_interval`` applied steps in a row the scale is multiplied by ``growth_factor``, never above
    ``maximum``.  ``sticky``: after a skipped step, all later steps are skipped too, and the scale stays.

    The struct is recorded in row ``step % len(ring)`` of ``ring``, on the struct's device, with ``finite`` of this step; ``step``
    is the number of steps finished before.  It is also recorded in ``mirror``, a tensor like ``ring`` that may be pinned host
    memory: after waiting for the launch, the host reads it without a copy.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    minimum: float
    maximum: float
    hysteresis: int
    sticky: bool = False
    ring: Tensor | None = None
    mirror: Tensor | None = None

    def __post_init__(self) -> None:
        self.struct = _Struct(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            minimum=self.minimum,
            maximum=self.maximum,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            sticky=self.sticky,
            slots=0 if self.ring is None else len(self.ring),
            ring=None if self.ring is None else self.ring.data_ptr(),
            mirror=None if self.mirror is None else self.mirror.data_ptr(),
        )


_NO_RULE = _Struct()


def finish(
    state: StepState,
    statistics: Tensor,
    *,
    scale: Tensor,
    divisor: float = 1.0,
    max_norm: float | None = None,
    origin: int = 0,
    sticky: bool = False,
    ending: ScaleRule | None = None,
    loss: Tensor | None = None,
) -> None:
    """Writes ``multiplier``, ``norm`` and ``found_inf`` for one optimizer's step; clears ``finite`` if the step is to be skipped.

    ``statistics``: the result of :func:`~fabricamp.ops.gradient_statistics` with the same ``scale`` and ``divisor``.  The
    multiplier is ``1 / (scale * divisor)`` times torch's clip coefficient.  ``origin`` is added to the index of the first
    non-finite statistic.  ``sticky``: an optimizer's step after a skipped one is skipped too, in the same accumulation step or a
    later one, even if its gradients are finite.

    ``ending`` also ends the training step in the same launch, as :func:`update_scale` does with this rule and ``loss``.
    """
    run = state.finish_kernel
    if run is not None:
        limit = -1.0 if max_norm is None else float(max_norm)
        rule = _NO_RULE if ending is None else ending.struct
        run(
            1, 1024, state.words,
            statistics, statistics.numel(), scale, float(divisor), limit, origin, int(sticky),
            rule, loss, int(ending is not None),
        )  # fmt: skip
        return
    _finish_reference(state, statistics, scale, divisor, max_norm, origin, sticky=sticky)
    if ending is not None:
        _end_reference(state, ending, loss)


@torch.no_grad()
def _finish_reference(
    state: StepState,
    statistics: Tensor,
    scale: Tensor,
    divisor: float,
    max_norm: float | None,
    origin: int,
    *,
    sticky: bool,
) -> None:
    norm = statistics.sum().sqrt()
    finite = torch.isfinite(norm)
    if sticky:
        finite = finite & (state.streak == 0) & (state.finite != 0)
    state.norm.copy_(norm)
    state.found_inf.copy_(~finite)
    state.finite.mul_(finite)
    if statistics.numel() > 0:
        bad = torch.isfinite(statistics).logical_not_()
        lowest = torch.where(bad.any(), bad.int().argmax() + origin, -1)
        state.bad_chunk.copy_(torch.where(state.bad_chunk < 0, lowest, state.bad_chunk))
    multiplier = (scale * divisor).reciprocal()
    if max_norm is not None:
        multiplier = multiplier * (max_norm / (norm + _NORM_EPSILON)).clamp_(max=1.0)
    state.multiplier.copy_(multiplier)


def update_scale(state: StepState, rule: ScaleRule, *, loss: Tensor | None = None) -> None:
    """Ends a training step: counts it as applied or skipped, updates the scale by ``rule``, sets ``finite`` to 1 again.

    The first of several skipped steps in a row stores its number, ``loss`` (fp32), scale and chunk in ``first_*``.
    """
    device = state.words.device
    if runs_kernels(device):
        kernel("finish", "update_scale", (), device)(1, 32, state.words, loss, rule.struct)
    else:
        _end_reference(state, rule, loss)


@torch.no_grad()
def _end_reference(state: StepState, rule: ScaleRule, loss: Tensor | None) -> None:
    if loss is not None:
        state.loss.copy_(loss.reshape(()))
    step = state.applied + state.skipped  # the number of steps before this one
    # A sticky rule skips every step after a skipped one; the scale must not fall with each of them.
    stays = (state.streak > 0) & (state.finite == 0) if rule.sticky else None
    _count(state, step)  # before the scale changes: ``first_scale`` is the scale of the skipped step
    before = state.scale.clone(), state.growth.clone(), state.hysteresis.clone()
    _update_scale(state, rule)
    if stays is not None:
        for value, old in zip((state.scale, state.growth, state.hysteresis), before, strict=True):
            value.copy_(torch.where(stays, old, value))
    if rule.ring is not None:
        rule.ring[step.long() % len(rule.ring)] = state.words
        if rule.mirror is not None:
            rule.mirror.copy_(rule.ring, non_blocking=True)
    state.finite.fill_(1)  # after the ring has recorded this step's value


def _count(state: StepState, step: Tensor) -> None:
    """Counts the step as applied or skipped; stores ``first_*`` at the first of several skipped steps in a row."""
    first = (state.finite == 0) & (state.streak == 0)
    for stored, value in (
        (state.first_window, step),
        (state.first_loss, state.loss),
        (state.first_scale, state.scale),
        (state.first_chunk, state.bad_chunk),
    ):
        stored.copy_(torch.where(first, value, stored))
    state.streak.add_(1).mul_(1 - state.finite)
    state.bad_chunk.fill_(-1)
    state.applied.add_(state.finite)
    state.skipped.add_(1 - state.finite)


def _update_scale(state: StepState, rule: ScaleRule) -> None:
    grown = (state.scale * rule.growth_factor).clamp_(max=rule.maximum)
    backed_off = (state.scale * rule.backoff_factor).clamp_(min=rule.minimum)
    applied = state.finite > 0
    left = (state.hysteresis - 1).clamp_(min=0)
    growth = (state.growth + 1) * state.finite
    grows = growth >= rule.growth_interval
    scale = torch.where(grows, grown, state.scale)
    state.scale.copy_(torch.where(~applied & (left == 0), backed_off, scale))
    state.growth.copy_(growth * ~grows)
    state.hysteresis.copy_(torch.where(applied, rule.hysteresis, left))
