"""LARC: multiplies each gradient by a rate of its own: the ratio of the parameter's norm and the gradient's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fabricamp.ops.reference import norms_of, prepared, rounded, unless_skipped, widened
from fabricamp.ops.rules import Rows, Rule, Steering, update
from fabricamp.ops.shards import whole_sums
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState


@dataclass
class LarcRule(Rule):
    """The options of one group: each gradient becomes ``rate * (gradient + weight_decay * parameter)``, in place.

    The rate is ``trust_coefficient * |parameter| / (|gradient| + weight_decay * |parameter| + eps)``.  With ``clip`` this is
    divided by ``lr`` and at most 1, so that the optimizer's ``lr`` times the rate is the smaller of the two.  The host never
    reads the rate.  If a parameter or its gradient is all zeros, the gradient stays unchanged, without weight decay.
    """

    kernel: ClassVar[str] = "larc"

    lr: float | Tensor
    weight_decay: float = 0.0
    trust_coefficient: float = 0.02
    eps: float = 1e-8
    clip: bool = True

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for kernels/larc.cu."""
        return (self.lr, self.weight_decay, self.trust_coefficient, self.eps, float(self.clip))

    @classmethod
    def launch(cls, table: Table, steering: Steering) -> None:
        """Launches the sums of squares of gradients and parameters, then one rate per row, then the scaling of the gradients."""
        words, _, _ = steering.arguments()
        numbers = table.numbers(2 * (table.chunks + table.rows))
        sums = numbers[: 2 * table.chunks]
        rates = numbers[2 * table.chunks :]
        table.launch(cls.kernel, "sums", words, sums)
        table.launch(cls.kernel, "rates", words, sums, whole_sums(table, sums, 2), rates, blocks=table.rows)
        table.launch(cls.kernel, "larc", words, rates, first_written=0)

    def reference(self, rows: Rows, steering: Steering) -> None:
        """Rewrites the gradients of one group in torch's operations."""
        if not rows.parameters:
            return

        def update() -> None:
            parameters = widened(rows.parameters)
            values = prepared(rows.gradients, parameters, steering.state, None)
            norms = torch.stack([norms_of(values), norms_of(parameters)], 1)
            if rows.shared is not None:
                norms = rows.shared.norms(norms)
            rates, decays = self._rates(*norms.unbind(1))
            if self.weight_decay != 0:
                values = list(torch._foreach_add(torch._foreach_mul(parameters, decays), values))
            rounded(torch._foreach_mul(values, rates), rows.gradients)

        unless_skipped(steering.state, rows.gradients, update)

    def _rates(self, gradients: Tensor, parameters: Tensor) -> tuple[list[Any], list[Any]]:
        """Returns the rate and the weight decay of each tensor from the norms: numbers on the CPU, else 0-dim tensors."""
        rates = self.trust_coefficient * parameters / (gradients + self.weight_decay * parameters + self.eps)
        if self.clip:
            rates = (rates / self.lr).clamp_max(1.0)
        plain = (gradients == 0) | (parameters == 0)
        rates = rates.masked_fill(plain, 1.0)
        decays = torch.full_like(rates, self.weight_decay).masked_fill(plain, 0.0)
        if rates.device.type == "cpu":
            return rates.tolist(), decays.tolist()
        return list(rates.unbind()), list(decays.unbind())


def larc(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], rule: LarcRule, *, state: StepState | None = None
) -> None:
    """Rewrites each gradient, times ``state.multiplier``, by ``rule``; nothing changes if ``state.found_inf`` is set."""
    update(rule, Rows(gradients, parameters), state)
