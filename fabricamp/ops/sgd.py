"""SGD with momentum: one pass over gradients, parameters, momentum buffers, and the half copies of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fabricamp.ops.reference import one_each
from fabricamp.ops.rules import Cells, Rule, Tensors, function_of


@dataclass
class SgdRule(Rule):
    """The options of one group.

    Weight decay is added to the gradient, or with ``decay_after_momentum`` to the result of momentum.  If momentum is 0, the
    buffers are not used and may be None.  ``buffer_filled`` is 0 until a buffer (all zeros) has received a gradient; the first
    gradient is added without dampening and sets ``buffer_filled`` to 1.
    """

    kernel: ClassVar[str] = "sgd"
    states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    cells: ClassVar[tuple[str, ...]] = ("buffer_filled",)

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decay_after_momentum: bool = False
    maximize: bool = False

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/sgd.cu."""
        flags = float(self.nesterov), float(self.decay_after_momentum), float(self.maximize)
        return (self.lr, self.momentum, self.dampening, self.weight_decay, *flags)

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates in torch's order of operations, so that the bits equal those of torch's SGD with ``foreach=True``."""
        (buffers,) = states
        (filled,) = cells
        values = list(torch._foreach_neg(gradients)) if self.maximize else gradients
        if self.weight_decay != 0 and not self.decay_after_momentum:
            values = _plus(values, parameters, self.weight_decay, keep=values is gradients)
        if self.momentum != 0:
            self._update_buffers(buffers, values, filled)
            values = _plus(values, buffers, self.momentum, keep=values is gradients) if self.nesterov else buffers
        if self.weight_decay != 0 and self.decay_after_momentum:
            values = _plus(values, parameters, self.weight_decay, keep=values is gradients or values is buffers)
        torch._foreach_add_(parameters, values, alpha=-float(self.lr))

    def _update_buffers(self, buffers: list[Tensor], values: list[Tensor], filled: Sequence[Tensor]) -> None:
        """Updates the momentum buffers with the gradients (``values``)."""
        on_host = filled[0].device.type == "cpu"
        before = [flag.item() for flag in filled] if on_host else []
        torch._foreach_mul_(buffers, self.momentum)
        known_filled = on_host and all(before)
        if self.dampening == 0 or known_filled:
            torch._foreach_add_(buffers, values, alpha=1 - self.dampening)
        else:
            factors: list[Any] = [1 - self.dampening * flag for flag in before]
            if not on_host:
                factors = one_each(1 - self.dampening * torch.stack(list(filled)).double(), values)
            torch._foreach_add_(buffers, torch._foreach_mul(values, factors))
        if not known_filled:
            torch._foreach_clamp_min_(list(filled), 1.0)


def _plus(values: list[Tensor], others: list[Tensor], times: float, *, keep: bool) -> list[Tensor]:
    """Returns ``values + times * others``, in place in ``values`` unless ``keep`` is set."""
    if keep:
        return list(torch._foreach_add(values, others, alpha=times))
    torch._foreach_add_(values, others, alpha=times)
    return values


sgd = function_of(SgdRule)
