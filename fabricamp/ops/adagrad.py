"""Adagrad: one pass over gradients, parameters, sums of squares, and the half copies of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fabricamp.ops.reference import one_each
from fabricamp.ops.rules import Cells, Rule, Tensors, function_of


@dataclass
class AdagradRule(Rule):
    """The options of one group.

    ``decoupled``: weight decay is applied to the parameter itself; else it is added to the gradient.  The learning rate of step
    ``n``, counted from 0, is ``lr / (1 + n * lr_decay)``.
    """

    kernel: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[str, ...]] = ("sum",)
    cells: ClassVar[tuple[str, ...]] = ("step",)

    lr: float | Tensor
    eps: float = 1e-10
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/adagrad.cu."""
        return (self.lr, self.eps, self.weight_decay, self.lr_decay, float(self.decoupled), float(self.maximize))

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates in torch's order of operations, so that the bits equal those of torch's Adagrad with ``foreach=True``."""
        (sums,) = states
        (steps,) = cells
        values = list(torch._foreach_neg(gradients)) if self.maximize else gradients
        rates = _rates(steps, float(self.lr), self.lr_decay)
        torch._foreach_add_(list(steps), 1.0)
        if self.weight_decay != 0 and self.decoupled:
            torch._foreach_mul_(parameters, _each([1 - rate * self.weight_decay for rate in rates], parameters))
        elif self.weight_decay != 0:
            values = list(torch._foreach_add(values, parameters, alpha=self.weight_decay))
        torch._foreach_addcmul_(sums, values, values, value=1)
        roots = list(torch._foreach_sqrt(sums))
        torch._foreach_add_(roots, self.eps)
        if isinstance(rates[0], torch.Tensor):
            values = list(torch._foreach_mul(values, _each(rates, values)))
            rates = [1.0] * len(values)
        torch._foreach_addcdiv_(parameters, values, roots, [-rate for rate in rates])


def _rates(steps: Sequence[Tensor], lr: float, lr_decay: float) -> list[Any]:
    """Returns each learning rate: a number if the steps are on the CPU or have no effect, else an fp64 tensor, to avoid a wait."""
    if lr_decay == 0:
        return [lr] * len(steps)
    if steps[0].device.type == "cpu":
        return [lr / (1 + step.item() * lr_decay) for step in steps]
    return list((lr / (1 + torch.stack(list(steps)).double() * lr_decay)).unbind())


def _each(factors: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Returns factors for a foreach operation: numbers unchanged, fp64 device tensors cast to the dtypes of ``tensors``."""
    return one_each(torch.stack(factors), tensors) if isinstance(factors[0], torch.Tensor) else factors


adagrad = function_of(AdagradRule)
