"""Adam and AdamW: one pass over gradients, parameters, both averages, and the half copies of the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fabricamp.ops.reference import corrections, logarithms
from fabricamp.ops.rules import Cells, Rule, Tensors, function_of


@dataclass
class AdamRule(Rule):
    """The options of one group.

    ``decoupled``: AdamW's weight decay; else weight decay is added to the gradient.  eps is added after the bias correction.
    """

    kernel: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    squares: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    cells: ClassVar[tuple[str, ...]] = ("step",)

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    decoupled: bool = True
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/adam.cu."""
        logs = logarithms(self.beta1, self.beta2, corrects=self.bias_correction)
        moments = self.beta1, self.beta2, self.eps
        return (self.lr, *moments, self.weight_decay, *logs, float(self.decoupled), float(self.maximize))

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates in torch's order of operations, so that the bits equal those of torch's Adam with ``foreach=True``."""
        averages, squares = states
        (steps,) = cells
        lr = float(self.lr)
        if self.maximize:
            gradients = list(torch._foreach_neg(gradients))
        torch._foreach_add_(list(steps), 1.0)
        if self.weight_decay != 0 and self.decoupled:
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
        elif self.weight_decay != 0:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self.weight_decay))
        torch._foreach_lerp_(averages, gradients, 1 - self.beta1)
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        roots = list(torch._foreach_sqrt(squares))
        sizes = [-lr] * len(steps)
        if steps[0].device.type == "cpu" and self.bias_correction:
            counts = [step.item() for step in steps]
            torch._foreach_div_(roots, [math.sqrt(1 - self.beta2**count) for count in counts])
            sizes = [lr / (1 - self.beta1**count) * -1 for count in counts]
        elif self.bias_correction:  # nothing is read from another device
            torch._foreach_div_(roots, list(corrections(steps, self.beta2).sqrt().unbind()))
            averages = list(torch._foreach_div(averages, list(corrections(steps, self.beta1).unbind())))
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(parameters, averages, roots, sizes)


adam = function_of(AdamRule)
