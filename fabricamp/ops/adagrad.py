"""Adagrad: one pass over gradients, parameters, sums of squares, and the half copies of the parameters."""

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

__all__ = ["AdagradRule", "adagrad", "adagrad_reference", "launch_adagrad"]


class AdagradRule(NamedTuple):
    """What the rows of one group share.

    ``decoupled`` takes weight decay from the parameter itself, else it is added to the gradient.  Step ``n``, from 0, has the
    rate ``lr / (1 + n * lr_decay)``.
    """

    lr: float | Tensor
    eps: float = 1e-10
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/adagrad.cu reads it."""
        return (self.lr, self.eps, self.weight_decay, self.lr_decay, float(self.decoupled), float(self.maximize))


@torch.no_grad()
def adagrad(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: AdagradRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
) -> None:
    """Updates ``parameters`` and ``sums`` (of squares) in place, adds 1 to each of ``steps`` (0-dim fp32), and writes ``copies``.

    Gradients are multiplied by ``state.multiplier``, then limited to +-``limit``; where ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        adagrad_reference(gradients, parameters, sums, steps, rule, copies=copies, state=state, limit=limit)
        return
    columns = (gradients, parameters, sums, copies or [None] * len(parameters))
    table = Table(columns, cells=(steps,), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_adagrad(table, state, limit)


def launch_adagrad(table: Table, state: StepState | None, limit: float | None, *, skips: bool = True) -> None:
    """Updates every row of ``table``: columns gradient, parameter, sum, copy; cell 0 the step."""
    words = None if state is None else state.words
    table.launch("adagrad", "adagrad", words, -1.0 if limit is None else float(limit), int(skips))


def adagrad_reference(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: AdagradRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
    skips: bool = True,
) -> None:
    """What :func:`adagrad` does, with the bits of torch's Adagrad(foreach=True); to be called without gradient mode."""
    if not parameters:
        return
    lr = float(rule.lr)

    def update() -> None:
        wide, totals = widened(parameters), widened(sums)
        values = prepared(gradients, wide, state, limit, negate=rule.maximize)
        rates = _rates(steps, lr, rule.lr_decay)
        torch._foreach_add_(list(steps), 1.0)
        if rule.weight_decay != 0 and rule.decoupled:
            torch._foreach_mul_(wide, _each([1 - rate * rule.weight_decay for rate in rates], wide))
        elif rule.weight_decay != 0:
            values = list(torch._foreach_add(values, wide, alpha=rule.weight_decay))
        torch._foreach_addcmul_(totals, values, values, value=1)
        roots = list(torch._foreach_sqrt(totals))
        torch._foreach_add_(roots, rule.eps)
        if isinstance(rates[0], torch.Tensor):
            values, rates = list(torch._foreach_mul(values, _each(rates, values))), [1.0] * len(values)
        torch._foreach_addcdiv_(wide, values, roots, [-rate for rate in rates])
        rounded(totals, sums)
        rounded(wide, parameters)
        if copies is not None:
            rounded(wide, copies)

    written: list[Any] = [*parameters, *sums, *steps, *[one for one in copies or () if one is not None]]
    unless_skipped(state if skips else None, written, update)


def _rates(steps: Sequence[Tensor], lr: float, lr_decay: float) -> list[Any]:
    """Numbers where steps are on the host's side, or play no role; fp64 tensors where reading them would be a wait."""
    if lr_decay == 0:
        return [lr] * len(steps)
    if steps[0].device.type == "cpu":
        return [lr / (1 + step.item() * lr_decay) for step in steps]
    return list((lr / (1 + torch.stack(list(steps)).double() * lr_decay)).unbind())


def _each(factors: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Factors as a foreach operation takes them: numbers as they are, fp64 ones on a device in the tensors' dtypes."""
    return one_each(torch.stack(factors), tensors) if isinstance(factors[0], torch.Tensor) else factors
