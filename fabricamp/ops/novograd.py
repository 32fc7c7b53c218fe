"""NovoGrad: momentum of gradients divided by a running average of their norms, one norm per tensor; two passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.ops.reference import corrections, logarithms, norms_of, one_each
from fabricamp.ops.rules import Cells, Rule, Steering, Tensors, function_of
from fabricamp.ops.table import Table


@dataclass
class NovoGradRule(Rule):
    """The options of one group.

    ``inside``: a gradient is divided by the norm, and weight decay is added to it, before it is added to its average; else the
    average is divided by the norm, and weight decay is applied to the parameter.  ``grad_averaging=False`` adds the full
    gradient, without the factor ``1 - beta1``.  ``largest`` averages the largest absolute values instead of the norms.
    ``from_zero`` starts the norm's average at 0, else at the first norm.  The state holds the average norm, not its square.
    """

    kernel: ClassVar[str] = "novograd"
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)
    cells: ClassVar[tuple[str, ...]] = ("step", "exp_avg_norm")
    wide_cells: ClassVar[tuple[str, ...]] = ("exp_avg_norm",)

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
        """The factor of a gradient when it is added to the average."""
        return 1.0 - self.beta1 if self.grad_averaging else 1.0

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/novograd.cu."""
        logs = logarithms(self.beta1, self.beta2, corrects=self.bias_correction)
        flags = float(self.inside), float(self.largest), float(self.from_zero)
        return (self.lr, self.beta1, self.beta2, self.new1, self.eps, self.weight_decay, *logs, *flags)

    @classmethod
    def launch(cls, table: Table, steering: Steering) -> None:
        """Launches the norms of the gradients, then their averages, then the update."""
        words, limit, skips = steering.arguments()
        numbers = table.numbers(table.chunks)
        table.launch(cls.kernel, "gradient_sizes", words, limit, skips, numbers)
        sums, largest = _whole_sizes(table, steering, numbers)
        table.launch(cls.kernel, "average_norms", words, skips, numbers, sums, largest, blocks=table.rows)
        table.launch(cls.kernel, "update", words, limit, skips)

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Computes the norms of the gradients and their averages, then updates the parameters."""
        (averages,) = states
        steps, norms = cells
        self._average_norms(gradients, steps, norms)
        denominators = torch.stack([norm.double() for norm in norms])
        sizes = torch.ones_like(denominators) * self.lr
        if self.bias_correction:
            denominators = denominators / corrections(steps, self.beta2).sqrt()
            sizes = sizes / corrections(steps, self.beta1)
        denominators = denominators + self.eps
        if self.inside:
            gradients = list(torch._foreach_div(gradients, one_each(denominators, gradients)))
            torch._foreach_add_(gradients, parameters, alpha=self.weight_decay)
        elif self.weight_decay != 0:
            torch._foreach_mul_(parameters, 1 - self.lr * self.weight_decay)
        if not self.inside:
            sizes = sizes / denominators
        torch._foreach_mul_(averages, self.beta1)
        torch._foreach_add_(averages, gradients, alpha=self.new1)
        torch._foreach_addcmul_(parameters, averages, one_each(sizes, parameters), value=-1)

    def _average_norms(self, gradients: list[Tensor], steps: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        power = 1 if self.largest else 2  # of the averaged values
        if self.largest:
            values = [one.abs().amax() if one.numel() > 0 else one.new_zeros(()) for one in gradients]
            new = torch.stack([value.double() for value in values])
        else:
            new = norms_of(gradients)
        if self.shared is not None:
            new = self.shared.largest(new) if self.largest else self.shared.norms(new)
        old = torch.stack([norm.double() for norm in norms])
        blended = (self.beta2 * old**power + (1 - self.beta2) * new**power) ** (1 / power)
        if not self.from_zero:
            blended = torch.where(torch.stack(list(steps)) == 0, new, blended)
        torch._foreach_copy_(list(norms), list(blended.unbind()))
        torch._foreach_add_(list(steps), 1.0)


def _whole_sizes(table: Table, steering: Steering, numbers: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns the sums of squares and the largest values of full rows; (None, None) if the rows are not sharded."""
    shared = table.shared
    if shared is None:
        return None, None
    words, _, skips = steering.arguments()
    sums, largest = shared.memory(2, table.device).view(2, table.rows).unbind()
    table.launch(NovoGradRule.kernel, "row_sizes", words, skips, numbers, sums, largest, blocks=table.rows)
    return shared.reduce_(sums), shared.reduce_(largest, dist.ReduceOp.MAX)


novograd = function_of(NovoGradRule)
