"""LARC: gradients times a rate for each tensor, the ratio of the norms of its parameter and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import prepared, rounded, unless_skipped, widened
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

__all__ = ["LarcRule", "larc", "larc_reference", "launch_larc"]


class LarcRule(NamedTuple):
    """What the rows of one group share.

    The rate is ``trust_coefficient * |parameter| / (|gradient| + weight_decay * |parameter| + eps)``; with ``clip`` that over
    ``lr``, at most 1, so that an optimizer's ``lr`` times it is the smaller of both.
    """

    lr: float | Tensor
    weight_decay: float = 0.0
    trust_coefficient: float = 0.02
    eps: float = 1e-8
    clip: bool = True

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as kernels/larc.cu reads it."""
        return (self.lr, self.weight_decay, self.trust_coefficient, self.eps, float(self.clip))


@torch.no_grad()
def larc(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], rule: LarcRule, *, state: StepState | None = None
) -> None:
    """Makes each gradient ``rate * (gradient + weight_decay * parameter)``, in place; the rate is never read by the host.

    Where a parameter or its gradient is all zeros the gradient stays as it is, without weight decay.
    Gradients are multiplied by ``state.multiplier`` first; where ``state.found_inf`` is set nothing changes.
    """
    if not parameters:
        return
    if not runs_kernels(parameters[0].device):
        larc_reference(gradients, parameters, rule, state=state)
        return
    table = Table((gradients, parameters), device=parameters[0].device)
    table.set_scalars([rule.scalars()])
    launch_larc(table, state)


def launch_larc(table: Table, state: StepState | None) -> None:
    """Rewrites column 0 (gradients) of ``table`` by the norms of columns 0 and 1 (parameters), in three launches."""
    words = None if state is None else state.words
    numbers = table.numbers(2 * (table.chunks + table.rows))
    sums, rates = numbers[: 2 * table.chunks], numbers[2 * table.chunks :]
    table.launch("larc", "sums", words, sums)
    table.launch("larc", "rates", words, sums, rates, blocks=table.rows)
    table.launch("larc", "larc", words, rates, first_written=0)


@torch.no_grad()
def larc_reference(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], rule: LarcRule, *, state: StepState | None = None
) -> None:
    """What :func:`larc` does, in torch's own operations."""
    if not parameters:
        return

    def update() -> None:
        wide = widened(parameters)
        values = prepared(gradients, wide, state, None)
        rates, decays = _rates(_norms(values), _norms(wide), rule)
        if rule.weight_decay != 0:
            values = list(torch._foreach_add(torch._foreach_mul(wide, decays), values))
        rounded(torch._foreach_mul(values, rates), gradients)

    unless_skipped(state, gradients, update)


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([norm.double() for norm in torch._foreach_norm(tensors, 2)])


def _rates(gradients: Tensor, parameters: Tensor, rule: LarcRule) -> tuple[list[Any], list[Any]]:
    """From norms to the rate and the weight decay of each tensor: numbers on the host's side, else tensors."""
    rates = rule.trust_coefficient * parameters / (gradients + rule.weight_decay * parameters + rule.eps)
    if rule.clip:
        rates = (rates / rule.lr).clamp_max(1.0)
    plain = (gradients == 0) | (parameters == 0)
    rates = rates.masked_fill(plain, 1.0)
    decays = torch.full_like(rates, rule.weight_decay).masked_fill(plain, 0.0)
    if rates.device.type == "cpu":
        return rates.tolist(), decays.tolist()
    return list(rates.unbind()), list(decays.unbind())
