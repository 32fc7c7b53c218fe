"""LAMB: Adam's direction, taken as far as the norms of each parameter and of its direction say; two passes."""

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

__all__ = ["LambRule", "lamb", "lamb_norm", "lamb_reference", "launch_lamb", "launch_norm"]


class LambRule(NamedTuple):
    """What the rows of one group share.

    ``decoupled`` adds weight decay to the direction, else it is added to the gradient.  ``grad_averaging`` False lets a gradient
    enter its average whole.  ``max_norm`` (0: no limit) clips by the norm of all gradients.  ``nvlamb`` adapts a group without
    weight decay too.
    """

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    decoupled: bool = True
    grad_averaging: bool = True
    max_norm: float = 0.0
    nvlamb: bool = False

    @property
    def adapts(self) -> bool:
        """Whether the step of a parameter depends on its norm."""
        return self.nvlamb or self.weight_decay != 0

    @property
    def new1(self) -> float:
        """What a gradient is multiplied by on its way into the average."""
        return 1.0 - self.beta1 if self.grad_averaging else 1.0

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/lamb.cu reads it."""
        correct = self.bias_correction
        logarithms = (logarithm(self.beta1), logarithm(self.beta2)) if correct else (-math.inf, -math.inf)
        flags = float(self.decoupled), float(self.adapts)
        moments = self.beta1, self.beta2, self.new1, self.eps
        return (self.lr, *moments, self.weight_decay, *logarithms, *flags, float(self.max_norm))


@torch.no_grad()
def lamb(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: LambRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
) -> None:
    """Updates ``parameters`` and both averages in place, adds 1 to each of ``steps`` (0-dim fp32), and writes ``copies``.

    Gradients are multiplied by ``state.multiplier``, limited to +-``limit``, then clipped to ``rule.max_norm`` all together; where
    ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        norm = lamb_norm(gradients, parameters, state, limit) if rule.max_norm > 0 else None
        lamb_reference(
            gradients, parameters, averages, squares, steps, rule, copies=copies, state=state, limit=limit, norm=norm
        )
        return
    columns = (gradients, parameters, averages, squares, copies or [None] * len(parameters))
    table = Table(columns, cells=(steps,), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_lamb(table, state, limit, launch_norm(table, state, limit) if rule.max_norm > 0 else None)


def launch_norm(
    table: Table, state: StepState | None, limit: float | None, measured: tuple[Tensor, float] | None = None
) -> Tensor:
    """Returns the norm of a table's gradients as an update reads them (0-dim fp64, good until the next one).

    ``measured`` (scale, divisor) says that ``state.norm`` holds that of the gradients divided by both; they are not read then.
    """
    numbers, norm = _memory(table)[0::2]
    words = None if state is None else state.words
    scale, divisor = measured or (None, 1.0)
    if measured is None:
        table.launch("lamb", "gradient_squares", words, -1.0 if limit is None else float(limit), numbers)
    table.launch("lamb", "total", words, numbers, table.chunks, scale, float(divisor), norm, blocks=1)
    return norm


def launch_lamb(
    table: Table,
    state: StepState | None,
    limit: float | None,
    norm: Tensor | None,
    *,
    skips: bool = True,
    counts: bool = True,
) -> None:
    """Updates every row of ``table``: columns gradient, parameter, average, square, copy; cell 0 the step, if it ``counts``.

    ``norm`` (0-dim fp64) is what ``max_norm`` is compared with; None clips nothing.
    """
    numbers, ratios, _ = _memory(table)
    words = None if state is None else state.words
    table.launch("lamb", "moments", words, -1.0 if limit is None else float(limit), int(skips), norm, numbers)
    table.launch("lamb", "trust_ratios", words, int(skips), numbers, ratios, blocks=table.rows)
    table.launch("lamb", "update", words, int(skips), int(counts), ratios)


def _memory(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers a chunk, one a row, and the norm."""
    numbers = table.numbers(2 * table.chunks + table.rows + 1)
    return numbers, numbers[2 * table.chunks :], numbers[2 * table.chunks + table.rows]


@torch.no_grad()
def lamb_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], state: StepState | None, limit: float | None
) -> Tensor:
    """Returns the norm of ``gradients`` as an update reads them (0-dim fp64)."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    values = prepared(gradients, widened(parameters), state, limit)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([one.double() for one in torch._foreach_norm(values)]))
    return norm


@torch.no_grad()
def lamb_reference(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rule: LambRule,
    *,
    copies: Sequence[Tensor | None] | None = None,
    state: StepState | None = None,
    limit: float | None = None,
    norm: Tensor | None = None,
    skips: bool = True,
    counts: bool = True,
) -> None:
    """What :func:`launch_lamb` does, in torch's own operations."""
    if not parameters:
        return

    def update() -> None:
        wide = widened(parameters)
        moments = widened(averages), widened(squares)
        values = prepared(gradients, wide, state, limit)
        if norm is not None and rule.max_norm > 0:
            coefficient = torch.where(norm > rule.max_norm, rule.max_norm / norm, 1.0)
            values = list(torch._foreach_mul(values, coefficient.to(values[0].device, non_blocking=True)))
        directions = _directions(values, wide, *moments, torch._foreach_add(list(steps), 1.0), rule)
        torch._foreach_addcmul_(wide, directions, _ratios(wide, directions, rule), value=-1)
        for narrow, full in ((averages, moments[0]), (squares, moments[1]), (parameters, wide)):
            rounded(full, narrow)
        if copies is not None:
            rounded(wide, copies)
        if counts:
            torch._foreach_add_(list(steps), 1.0)

    written: list[Any] = [*parameters, *averages, *squares, *steps, *[one for one in copies or () if one is not None]]
    unless_skipped(state if skips else None, written, update)


def _directions(
    gradients: list[Tensor],
    parameters: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[Tensor],
    rule: LambRule,
) -> list[Tensor]:
    """Takes the gradients into both averages and returns what those say."""
    if rule.weight_decay != 0 and not rule.decoupled:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=rule.weight_decay))
    torch._foreach_mul_(averages, rule.beta1)
    torch._foreach_add_(averages, gradients, alpha=rule.new1)
    torch._foreach_mul_(squares, rule.beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - rule.beta2)
    roots = list(torch._foreach_sqrt(squares))
    if rule.bias_correction:
        torch._foreach_div_(roots, one_each(corrections(steps, rule.beta2).sqrt(), roots))
    torch._foreach_add_(roots, rule.eps)
    directions = list(torch._foreach_div(averages, roots))
    if rule.bias_correction:
        torch._foreach_div_(directions, one_each(corrections(steps, rule.beta1), directions))
    if rule.weight_decay != 0 and rule.decoupled:
        torch._foreach_add_(directions, parameters, alpha=rule.weight_decay)
    return directions


def _ratios(parameters: list[Tensor], directions: list[Tensor], rule: LambRule) -> list[Tensor]:
    """How far each parameter goes: lr, times its norm over that of its direction where the rule adapts and neither is 0."""
    ratios = torch.ones(len(parameters), dtype=torch.float64, device=parameters[0].device)
    if rule.adapts:
        of_parameters = torch.stack([one.double() for one in torch._foreach_norm(parameters)])
        of_directions = torch.stack([one.double() for one in torch._foreach_norm(directions)])
        adapted = (of_parameters != 0) & (of_directions != 0)
        ratios = torch.where(adapted, of_parameters / of_directions, ratios)
    return one_each(ratios * rule.lr, parameters)
