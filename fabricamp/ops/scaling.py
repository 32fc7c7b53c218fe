"""From gradient statistics to one multiplier, and the loss scaler's rule: on the device, nothing read by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["finish", "update_scale"]

_NORM_EPSILON = 1e-6  # torch's clip_grad_norm_ adds the same


@torch.no_grad()
def finish(state: StepState, statistics: Tensor, *, inverse_scale: Tensor, max_norm: float | None = None) -> None:
    """Writes ``multiplier``, ``norm`` and ``found_inf`` of one optimizer's step, and folds it into the window's ``finite``.

    ``statistics`` is what :func:`~fabricamp.ops.gradient_statistics` gave with the same ``inverse_scale`` (which carries the
    strategy's divisor too); the multiplier is ``inverse_scale`` times torch's clip coefficient.
    """
    norm = statistics.reshape(()).sqrt()
    finite = torch.isfinite(norm)
    state.norm.copy_(norm)
    state.found_inf.copy_(~finite)
    state.finite.mul_(finite)
    multiplier = inverse_scale
    if max_norm is not None:
        multiplier = multiplier * (max_norm / (norm + _NORM_EPSILON)).clamp_(max=1.0)
    state.multiplier.copy_(multiplier)


@torch.no_grad()
def update_scale(
    state: StepState,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    minimum: float,
    maximum: float,
    hysteresis: int,
) -> None:
    """Ends a window: counts it as applied or skipped, moves the scale, and opens the next window as finite.

    An overflow takes one off ``hysteresis``; at 0 the scale is multiplied by ``backoff_factor``, never below ``minimum``.  After
    ``growth_interval`` applied windows in a row it is multiplied by ``growth_factor``, never above ``maximum``.
    """
    applied = state.finite
    skipped = 1 - applied
    state.applied.add_(applied)
    state.skipped.add_(skipped)
    left = (state.hysteresis - skipped).clamp_(min=0)
    growth = (state.growth + 1) * applied
    grows = growth >= growth_interval
    grown = (state.scale * growth_factor).clamp_(max=maximum)
    backed_off = (state.scale * backoff_factor).clamp_(min=minimum)
    scale = torch.where(grows, grown, state.scale)
    state.scale.copy_(torch.where((skipped > 0) & (left == 0), backed_off, scale))
    state.growth.copy_(growth * ~grows)
    state.hysteresis.copy_(torch.where(applied > 0, hysteresis, left))
    state.finite.fill_(1)
