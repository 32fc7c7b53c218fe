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
    """What the rows of one group share.

    ``decoupled`` takes weight decay from the parameter itself, else it is added to the gradient.  Step ``n``, from 0, has the
    rate ``lr / (1 + n * lr_decay)``.
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
        """The rule as kernels/adagrad.cu reads it."""
        return (self.lr, self.eps, self.weight_decay, self.lr_decay, float(self.decoupled), float(self.maximize))

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Torch's own order of operations, so that its Adagrad with ``foreach=True`` has equal bits."""
        (sums,), (steps,) = states, cells
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
            values, rates = list(torch._foreach_mul(values, _each(rates, values))), [1.0] * len(values)
        torch._foreach_addcdiv_(parameters, values, roots, [-rate for rate in rates])


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


adagrad = function_of(AdagradRule)
