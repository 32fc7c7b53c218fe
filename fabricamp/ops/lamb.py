"""LAMB: Adam's direction, scaled by the ratio of the norms of the parameter and of its direction; two passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fabricamp.ops.reference import corrections, logarithms, norms_of, one_each, prepared, widened
from fabricamp.ops.rules import Cells, Rows, Rule, Steering, Tensors, function_of
from fabricamp.ops.shards import whole_sums
from fabricamp.ops.table import Table


@dataclass
class LambRule(Rule):
    """The options of one group.

    ``decoupled``: weight decay is added to the direction, else to the gradient.  ``grad_averaging=False`` adds the full gradient
    to its average, without the factor ``1 - beta1``.  ``max_norm`` (0: no limit) clips by the norm of all gradients.  ``nvlamb``:
    a group without weight decay is scaled by the ratio of the norms too.
    """

    kernel: ClassVar[str] = "lamb"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    cells: ClassVar[tuple[str, ...]] = ("step",)
    counts: ClassVar[bool] = True
    """Whether an update increments the step counts."""

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
        """Whether the step size of a parameter depends on its norm."""
        return self.nvlamb or self.weight_decay != 0

    @property
    def new1(self) -> float:
        """The factor of a gradient when it is added to the average."""
        return 1.0 - self.beta1 if self.grad_averaging else 1.0

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/lamb.cu."""
        logs = logarithms(self.beta1, self.beta2, corrects=self.bias_correction)
        flags = float(self.decoupled), float(self.adapts)
        moments = self.beta1, self.beta2, self.new1, self.eps
        return (self.lr, *moments, self.weight_decay, *logs, *flags, float(self.max_norm))

    @classmethod
    def launch(cls, table: Table, steering: Steering) -> None:
        """Launches both averages with the norms of parameters and directions, then the ratios of the norms, then the update."""
        words, limit, skips = steering.arguments()
        numbers, ratios, _ = _memory(table)
        table.launch(cls.kernel, "moments", words, limit, skips, steering.norm, numbers)
        whole = whole_sums(table, numbers, 2)
        table.launch(cls.kernel, "trust_ratios", words, skips, numbers, whole, ratios, blocks=table.rows)
        table.launch(cls.kernel, "update", words, skips, int(cls.counts), ratios)

    def measure(self, rows: Table | Rows, steering: Steering) -> Tensor | None:
        """Returns the norm of the gradients if the rule clips, else None."""
        if self.max_norm <= 0:
            return None
        return gradient_norm(rows, steering) if isinstance(rows, Rows) else launch_norm(rows, steering)

    def gradients(self, rows: Rows, parameters: Sequence[Tensor], steering: Steering) -> list[Tensor]:
        """Returns the gradients clipped by ``steering.norm``."""
        values = super().gradients(rows, parameters, steering)
        norm = steering.norm
        if norm is None or self.max_norm <= 0:
            return values
        coefficient = torch.where(norm > self.max_norm, self.max_norm / norm, 1.0)
        return list(torch._foreach_mul(values, coefficient.to(values[0].device, non_blocking=True)))

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Moves the parameters along their directions, scaled by the ratios of the norms."""
        averages, squares = states
        (steps,) = cells
        counts = torch._foreach_add(list(steps), 1.0)
        directions = self._directions(gradients, parameters, averages, squares, counts)
        torch._foreach_addcmul_(parameters, directions, self._ratios(parameters, directions), value=-1)
        if self.counts:
            torch._foreach_add_(list(steps), 1.0)

    def _directions(
        self, gradients: Tensors, parameters: Tensors, averages: Tensors, squares: Tensors, steps: Sequence[Tensor]
    ) -> Tensors:
        """Updates both averages with the gradients, and returns the directions."""
        if self.weight_decay != 0 and not self.decoupled:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self.weight_decay))
        torch._foreach_mul_(averages, self.beta1)
        torch._foreach_add_(averages, gradients, alpha=self.new1)
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        roots = list(torch._foreach_sqrt(squares))
        if self.bias_correction:
            torch._foreach_div_(roots, one_each(corrections(steps, self.beta2).sqrt(), roots))
        torch._foreach_add_(roots, self.eps)
        directions = list(torch._foreach_div(averages, roots))
        if self.bias_correction:
            torch._foreach_div_(directions, one_each(corrections(steps, self.beta1), directions))
        if self.weight_decay != 0 and self.decoupled:
            torch._foreach_add_(directions, parameters, alpha=self.weight_decay)
        return directions

    def _ratios(self, parameters: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Returns each step size: lr, times |parameter| / |direction| if the rule adapts and neither norm is 0."""
        ratios = torch.ones(len(parameters), dtype=torch.float64, device=parameters[0].device)
        if self.adapts:
            norms = torch.stack([norms_of(parameters), norms_of(directions)], 1)
            if self.shared is not None:
                norms = self.shared.norms(norms)
            of_parameters, of_directions = norms.unbind(1)
            adapted = (of_parameters != 0) & (of_directions != 0)
            ratios = torch.where(adapted, of_parameters / of_directions, ratios)
        return one_each(ratios * self.lr, parameters)


def launch_norm(table: Table, steering: Steering, measured: tuple[Tensor, float] | None = None) -> Tensor:
    """Returns the norm of a table's gradients as an update reads them (0-dim fp64, valid until the next call).

    ``measured`` (scale, divisor): ``state.norm`` holds the norm of the gradients divided by both; the gradients are not read then.
    """
    numbers, _, norm = _memory(table)
    count = table.chunks
    words, limit, _ = steering.arguments()
    scale, divisor = measured or (None, 1.0)
    if measured is None:
        table.launch("lamb", "gradient_squares", words, limit, numbers)
        whole = whole_sums(table, numbers, 1)
        if whole is not None:
            numbers = whole
            count = table.rows
    table.launch("lamb", "total", words, numbers, count, scale, float(divisor), norm, blocks=1)
    return norm


def gradient_norm(rows: Rows, steering: Steering) -> Tensor:
    """Returns the norm of the gradients as an update reads them (0-dim fp64), in torch's operations."""
    if not rows.gradients:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    values = prepared(rows.gradients, widened(rows.parameters), steering.state, steering.limit)
    norms = norms_of(values)
    if rows.shared is not None:
        norms = rows.shared.norms(norms)
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def _memory(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory for two numbers per chunk, for one number per row, and for the norm."""
    numbers = table.numbers(2 * table.chunks + table.rows + 1)
    return numbers, numbers[2 * table.chunks :], numbers[2 * table.chunks + table.rows]


lamb = function_of(LambRule)
