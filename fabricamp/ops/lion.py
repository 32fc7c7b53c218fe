"""Lion: one pass over gradients, parameters, momentum, and the half copies of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fabricamp.ops.rules import Cells, Rule, Tensors, function_of


@dataclass
class LionRule(Rule):
    """The options of one group (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms).

    A parameter moves by ``-lr`` times the sign of ``beta1 * momentum + (1 - beta1) * gradient``; the momentum is then updated
    with the decay rate ``beta2``.  Weight decay is decoupled.
    """

    kernel: ClassVar[str] = "lion"
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/lion.cu."""
        return (self.lr, self.beta1, self.beta2, self.weight_decay)

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates by the formula of the paper."""
        (averages,) = states
        lr = float(self.lr)
        directions = list(torch._foreach_mul(averages, self.beta1))
        torch._foreach_add_(directions, gradients, alpha=1 - self.beta1)
        # torch's sign of NaN is 0.
        directions = [torch.where(value.isnan(), value, value.sign()) for value in directions]
        torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
        torch._foreach_add_(parameters, directions, alpha=-lr)
        torch._foreach_mul_(averages, self.beta2)
        torch._foreach_add_(averages, gradients, alpha=1 - self.beta2)


lion = function_of(LionRule)
