"""Adam and AdamW: one pass over gradients, parameters, both averages, and the half copies of the parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import prepared, rounded, unless_skipped, widened
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["AdamRule", "adam", "adam_reference", "launch_adam"]


class AdamRule(NamedTuple):
    """What the rows of one group share.

    ``decoupled`` is AdamW's weight decay, else it is added to the gradient; eps is added after the bias correction.
    """

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    decoupled: bool = True
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/adam.cu reads it."""
        logarithms = (_log(self.beta1), _log(self.beta2)) if self.bias_correction else (-math.inf, -math.inf)
        decoupled, maximize = float(self.decoupled), float(self.maximize)
        return (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, *logarithms, decoupled, maximize)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@torch.no_grad()
def adam(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: AdamRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
) -> None:
    """Updates ``parameters`` and both averages in place, adds 1 to each of ``steps`` (0-dim fp32), and writes ``copies``.

    Gradients are multiplied by ``state.multiplier``, then limited to +-``limit``; where ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        adam_reference(gradients, parameters, averages, squares, steps, rule, copies=copies, state=state, limit=limit)
        return
    columns = (gradients, parameters, averages, squares, copies or [None] * len(parameters))
    table = Table(columns, cells=(steps,), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_adam(table, state, limit)


def launch_adam(table: Table, state: StepState | None, limit: float | None, *, skips: bool = True) -> None:
    """Updates every row of ``table``: columns gradient, parameter, average, square, copy; cell 0 the step."""
    words = None if state is None else state.words
    table.launch("adam", "adam", words, -1.0 if limit is None else float(limit), int(skips))


@torch.no_grad()
def adam_reference(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: AdamRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
    skips: bool = True,
) -> None:
    """What :func:`adam` does, in torch's own operations."""
    if not parameters:
        return
    lr = float(rule.lr)

    def update() -> None:
        wide = widened(parameters)
        moments = widened(averages), widened(squares)
        values = prepared(gradients, wide, state, limit, negate=rule.maximize)
        torch._foreach_add_(list(steps), 1.0)
        _step(values, wide, *moments, steps, rule, lr)
        for narrow, full in ((averages, moments[0]), (squares, moments[1]), (parameters, wide)):
            rounded(full, narrow)
        if copies is not None:
            rounded(wide, copies)

    written: list[Any] = [*parameters, *averages, *squares, *steps, *[one for one in copies or () if one is not None]]
    unless_skipped(state if skips else None, written, update)


def _step(
    gradients: list[Tensor],
    parameters: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[Tensor],
    rule: AdamRule,
    lr: float,
) -> None:
    """Torch's own order of operations, so that its Adam with ``foreach=True`` has equal bits."""
    if rule.weight_decay != 0 and rule.decoupled:
        torch._foreach_mul_(parameters, 1 - lr * rule.weight_decay)
    elif rule.weight_decay != 0:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=rule.weight_decay))
    torch._foreach_lerp_(averages, gradients, 1 - rule.beta1)
    torch._foreach_mul_(squares, rule.beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - rule.beta2)
    roots = list(torch._foreach_sqrt(squares))
    if steps[0].device.type == "cpu" and rule.bias_correction:
        counts = [step.item() for step in steps]
        torch._foreach_div_(roots, [math.sqrt(1 - rule.beta2**count) for count in counts])
        sizes = [lr / (1 - rule.beta1**count) * -1 for count in counts]
    elif rule.bias_correction:  # nothing is read from another device
        torch._foreach_div_(roots, [_correction(step, rule.beta2).sqrt() for step in steps])
        averages = list(torch._foreach_div(averages, [_correction(step, rule.beta1) for step in steps]))
        sizes = [-lr] * len(steps)
    else:
        sizes = [-lr] * len(steps)
    torch._foreach_add_(roots, rule.eps)
    torch._foreach_addcdiv_(parameters, averages, roots, sizes)


def _correction(step: Tensor, beta: float) -> Tensor:
    """``1 - beta**step``, whose digits a difference would lose."""
    return (step.double() * _log(beta)).expm1().neg()
