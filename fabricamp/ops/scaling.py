"""From gradient statistics to one multiplier, and the loss scaler's rule: on the device, nothing read by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.ops.bridge import kernel, runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["finish", "update_scale"]

_NORM_EPSILON = 1e-6  # torch's clip_grad_norm_ adds the same


def finish(
    state: StepState,
    statistics: Tensor,
    *,
    scale: Tensor,
    divisor: float = 1.0,
    max_norm: float | None = None,
    origin: int = 0,
) -> None:
    """Writes ``multiplier``, ``norm`` and ``found_inf`` of one optimizer's step, and folds it into the window's ``finite``.

    ``statistics`` is what :func:`~fabricamp.ops.gradient_statistics` gave with the same ``scale`` and ``divisor``; the multiplier
    is their inverse times torch's clip coefficient.  ``origin`` is added to the number of the lowest bad statistic.
    """
    device = statistics.device
    if runs_kernels(device):
        run = kernel("finish", "finish", (), device)
        limit = -1.0 if max_norm is None else float(max_norm)
        run(1, 1024, state.words, statistics, statistics.numel(), scale, float(divisor), limit, origin)
    else:
        _finish_reference(state, statistics, scale, divisor, max_norm, origin)


@torch.no_grad()
def _finish_reference(
    state: StepState, statistics: Tensor, scale: Tensor, divisor: float, max_norm: float | None, origin: int
) -> None:
    norm = statistics.sum().sqrt()
    finite = torch.isfinite(norm)
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


def update_scale(
    state: StepState,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    minimum: float,
    maximum: float,
    hysteresis: int,
    loss: Tensor | None = None,
    ring: Tensor | None = None,
) -> None:
    """Ends a window: counts it as applied or skipped, moves the scale, and opens the next window as finite.

    An overflow takes one off ``hysteresis``; at 0 the scale is multiplied by ``backoff_factor``, never below ``minimum``.  After
    ``growth_interval`` applied windows in a row it is multiplied by ``growth_factor``, never above ``maximum``.  The first of
    several overflows in a row leaves window, ``loss`` (fp32), scale and chunk in ``first_*``.  The struct is recorded in row
    ``window % len(ring)`` of ``ring``, on its device, with the window's own ``finite``.
    """
    device = state.words.device
    if runs_kernels(device):
        run = kernel("finish", "update_scale", (), device)
        slots = 0 if ring is None else ring.shape[0]
        rule = float(growth_factor), float(backoff_factor), growth_interval, float(minimum), float(maximum), hysteresis
        run(1, 32, state.words, loss, ring, slots, *rule)
        return
    with torch.no_grad():
        if loss is not None:
            state.loss.copy_(loss.reshape(()))
        window = state.applied + state.skipped
        _count(state, window)
        grown = (state.scale * growth_factor).clamp_(max=maximum)
        backed_off = (state.scale * backoff_factor).clamp_(min=minimum)
        _move_scale(state, grown, backed_off, growth_interval, hysteresis)
        if ring is not None:
            ring[window.long() % len(ring)] = state.words
        state.finite.fill_(1)


def _count(state: StepState, window: Tensor) -> None:
    """Counts the window, and keeps what was seen at the first of several that are skipped in a row."""
    first = (state.finite == 0) & (state.streak == 0)
    seen = (
        ("first_window", window),
        ("first_loss", state.loss),
        ("first_scale", state.scale),
        ("first_chunk", state.bad_chunk),
    )
    for name, value in seen:
        latched: Tensor = getattr(state, name)
        latched.copy_(torch.where(first, value, latched))
    state.streak.add_(1).mul_(1 - state.finite)
    state.bad_chunk.fill_(-1)
    state.applied.add_(state.finite)
    state.skipped.add_(1 - state.finite)


def _move_scale(state: StepState, grown: Tensor, backed_off: Tensor, growth_interval: int, hysteresis: int) -> None:
    applied = state.finite > 0
    left = (state.hysteresis - 1).clamp_(min=0)
    growth = (state.growth + 1) * state.finite
    grows = growth >= growth_interval
    scale = torch.where(grows, grown, state.scale)
    state.scale.copy_(torch.where(~applied & (left == 0), backed_off, scale))
    state.growth.copy_(growth * ~grows)
    state.hysteresis.copy_(torch.where(applied, hysteresis, left))
