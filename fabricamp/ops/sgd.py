"""SGD with momentum: one pass over gradients, parameters, momentum buffers, and the half copies of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import one_each, prepared, rounded, unless_skipped, widened
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["SgdRule", "launch_sgd", "sgd", "sgd_reference"]


class SgdRule(NamedTuple):
    """What the rows of one group share.

    Weight decay is added to the gradient, or with ``decay_after_momentum`` to what momentum made of it.
    """

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decay_after_momentum: bool = False
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/sgd.cu reads it."""
        flags = float(self.nesterov), float(self.decay_after_momentum), float(self.maximize)
        return (self.lr, self.momentum, self.dampening, self.weight_decay, *flags)


@torch.no_grad()
def sgd(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor | None],
    filled: Sequence[Tensor],
    rule: SgdRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
) -> None:
    """Updates ``parameters`` and ``buffers`` in place, and writes ``copies``.

    Without momentum ``buffers`` are left alone and may be None.  ``filled`` (0-dim fp32) is 0 while a buffer, all zeros, has
    seen no gradient: the first one enters without dampening and sets it to 1.
    Gradients are multiplied by ``state.multiplier``, then limited to +-``limit``; where ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        sgd_reference(gradients, parameters, buffers, filled, rule, copies=copies, state=state, limit=limit)
        return
    columns = (gradients, parameters, buffers, copies or [None] * len(parameters))
    table = Table(columns, cells=(filled,), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_sgd(table, state, limit)


def launch_sgd(table: Table, state: StepState | None, limit: float | None, *, skips: bool = True) -> None:
    """Updates every row of ``table``: columns gradient, parameter, buffer, copy; cell 0 says whether the buffer is filled."""
    words = None if state is None else state.words
    table.launch("sgd", "sgd", words, -1.0 if limit is None else float(limit), int(skips))


def sgd_reference(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor | None],
    filled: Sequence[Tensor],
    rule: SgdRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
    skips: bool = True,
) -> None:
    """What :func:`sgd` does, in torch's own operations; to be called without gradient mode."""
    if not parameters:
        return
    lr = float(rule.lr)
    moving = [one for one in buffers if one is not None] if rule.momentum != 0 else []

    def update() -> None:
        wide, moved = widened(parameters), widened(moving)
        values = prepared(gradients, wide, state, limit, negate=rule.maximize)
        if rule.weight_decay != 0 and not rule.decay_after_momentum:
            values = _plus(values, wide, rule.weight_decay, gradients)
        if rule.momentum != 0:
            _move(moved, values, filled, rule)
            values = _plus(values, moved, rule.momentum, gradients) if rule.nesterov else moved
        if rule.weight_decay != 0 and rule.decay_after_momentum:
            values = _plus(values, wide, rule.weight_decay, [*gradients, *moved])
        torch._foreach_add_(wide, values, alpha=-lr)
        rounded(moved, moving)
        rounded(wide, parameters)
        if copies is not None:
            rounded(wide, copies)

    if state is None or not skips:
        update()
        return
    written: list[Any] = [*parameters, *moving, *filled, *[one for one in copies or () if one is not None]]
    unless_skipped(state, written, update)


def _plus(values: list[Tensor], others: list[Tensor], times: float, keep: Sequence[Tensor]) -> list[Tensor]:
    """Returns ``values + times * others``, in the memory of ``values`` unless one of them has to be kept."""
    kept = set(map(id, keep))
    if any(id(value) in kept for value in values):
        return list(torch._foreach_add(values, others, alpha=times))
    torch._foreach_add_(values, others, alpha=times)
    return values


def _move(buffers: list[Tensor], values: list[Tensor], filled: Sequence[Tensor], rule: SgdRule) -> None:
    """Takes the gradients in, in torch's own order of operations, so that its SGD with ``foreach=True`` has equal bits."""
    on_host = filled[0].device.type == "cpu"
    before = [one.item() for one in filled] if on_host else []
    torch._foreach_mul_(buffers, rule.momentum)
    if rule.dampening == 0 or (on_host and all(before)):
        torch._foreach_add_(buffers, values, alpha=1 - rule.dampening)
    else:
        shares: list[Any] = [1 - rule.dampening * one for one in before]
        if not on_host:
            shares = one_each(1 - rule.dampening * torch.stack(list(filled)).double(), values)
        torch._foreach_add_(buffers, torch._foreach_mul(values, shares))
    if not (on_host and all(before)):
        torch._foreach_clamp_min_(list(filled), 1.0)
