"""NovoGrad: momentum of gradients divided by a running average of their norms, one norm a tensor; two passes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import corrections, logarithm, one_each, prepared, rounded, unless_skipped, widened
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["NovoGradRule", "launch_novograd", "novograd", "novograd_reference"]


class NovoGradRule(NamedTuple):
    """What the rows of one group share.

    ``inside``: a gradient is divided by the norm, and weight decay added, before it enters its average; else the average is.
    ``grad_averaging`` False lets a gradient enter whole.  ``largest`` averages the largest absolute values instead of the norms.
    ``from_zero`` starts the norm's average at 0, else at the first norm.
    """

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    inside: bool = False
    grad_averaging: bool = True
    largest: bool = False
    from_zero: bool = False

    @property
    def new1(self) -> float:
        """What a gradient is multiplied by on its way into the average."""
        return 1.0 - self.beta1 if self.grad_averaging else 1.0

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/novograd.cu reads it."""
        correct = self.bias_correction
        logarithms = (logarithm(self.beta1), logarithm(self.beta2)) if correct else (-math.inf, -math.inf)
        flags = float(self.inside), float(self.largest), float(self.from_zero)
        return (self.lr, self.beta1, self.beta2, self.new1, self.eps, self.weight_decay, *logarithms, *flags)


@torch.no_grad()
def novograd(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Sequence[Tensor],
    rule: NovoGradRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
) -> None:
    """Updates ``parameters``, ``averages`` and ``norms`` in place, adds 1 to each of ``steps``, and writes ``copies``.

    ``steps`` (fp32) and ``norms`` (fp64 for fp64 parameters, else fp32) are 0-dim; a norm is averaged, not its square.
    Gradients are multiplied by ``state.multiplier``, then limited to +-``limit``; where ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        novograd_reference(gradients, parameters, averages, steps, norms, rule, copies=copies, state=state, limit=limit)
        return
    columns = (gradients, parameters, averages, copies or [None] * len(parameters))
    table = Table(columns, cells=(steps, norms), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_novograd(table, state, limit)


def launch_novograd(table: Table, state: StepState | None, limit: float | None, *, skips: bool = True) -> None:
    """Updates every row of ``table``: columns gradient, parameter, average, copy; cells the step and the norm's average."""
    numbers = table.numbers(table.chunks)
    words, most = None if state is None else state.words, -1.0 if limit is None else float(limit)
    table.launch("novograd", "gradient_sizes", words, most, int(skips), numbers)
    table.launch("novograd", "average_norms", words, int(skips), numbers, blocks=table.rows)
    table.launch("novograd", "update", words, most, int(skips))


@torch.no_grad()
def novograd_reference(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Sequence[Tensor],
    rule: NovoGradRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
    skips: bool = True,
) -> None:
    """What :func:`novograd` does, in torch's own operations."""
    if not parameters:
        return

    def update() -> None:
        wide, moments = widened(parameters), widened(averages)
        values = prepared(gradients, wide, state, limit)
        _average_norms(values, steps, norms, rule)
        _step(values, wide, moments, steps, norms, rule)
        rounded(moments, averages)
        rounded(wide, parameters)
        if copies is not None:
            rounded(wide, copies)

    written: list[Any] = [*parameters, *averages, *steps, *norms, *[one for one in copies or () if one is not None]]
    unless_skipped(state if skips else None, written, update)


def _average_norms(
    gradients: list[Tensor], steps: Sequence[Tensor], norms: Sequence[Tensor], rule: NovoGradRule
) -> None:
    power = 1 if rule.largest else 2  # of what is averaged
    new = torch.stack([one.double() for one in _norms(gradients, largest=rule.largest)])
    old = torch.stack([one.double() for one in norms])
    blended = (rule.beta2 * old**power + (1 - rule.beta2) * new**power) ** (1 / power)
    if not rule.from_zero:
        blended = torch.where(torch.stack(list(steps)) == 0, new, blended)
    torch._foreach_copy_(list(norms), list(blended.unbind()))
    torch._foreach_add_(list(steps), 1.0)


def _norms(gradients: list[Tensor], *, largest: bool) -> Sequence[Tensor]:
    if not largest:
        return torch._foreach_norm(gradients)
    return [one.abs().amax() if one.numel() > 0 else one.new_zeros(()) for one in gradients]


def _step(
    gradients: list[Tensor],
    parameters: list[Tensor],
    averages: list[Tensor],
    steps: Sequence[Tensor],
    norms: Sequence[Tensor],
    rule: NovoGradRule,
) -> None:
    denominators = torch.stack([one.double() for one in norms])
    sizes = torch.ones_like(denominators) * rule.lr
    if rule.bias_correction:
        denominators = denominators / corrections(steps, rule.beta2).sqrt()
        sizes = sizes / corrections(steps, rule.beta1)
    denominators = denominators + rule.eps
    if rule.inside:
        gradients = list(torch._foreach_div(gradients, one_each(denominators, gradients)))
        torch._foreach_add_(gradients, parameters, alpha=rule.weight_decay)
    elif rule.weight_decay != 0:
        torch._foreach_mul_(parameters, 1 - rule.lr * rule.weight_decay)
    if not rule.inside:
        sizes = sizes / denominators
    torch._foreach_mul_(averages, rule.beta1)
    torch._foreach_add_(averages, gradients, alpha=rule.new1)
    torch._foreach_addcmul_(parameters, averages, one_each(sizes, parameters), value=-1)
