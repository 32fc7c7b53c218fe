"""What the torch references of the update ops share: gradients made ready, wide arithmetic, the skip."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.ops.dtypes import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

_dtype: Final = attrgetter("dtype")


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of half tensors, and the others themselves; the list that was given where none is half."""
    if isinstance(tensors, list) and HALF_DTYPES.isdisjoint(map(_dtype, tensors)):
        return tensors
    return [tensor.float() if tensor.dtype in HALF_DTYPES else tensor for tensor in tensors]


def rounded(wide: Sequence[Tensor], narrow: Sequence[Tensor | None]) -> None:
    """Writes back what :func:`widened` had to copy; None takes nothing."""
    if wide is narrow:
        return
    pairs = [(to, value) for value, to in zip(wide, narrow, strict=True) if to is not None and to is not value]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])


def prepared(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    state: StepState | None,
    limit: float | None,
) -> list[Tensor]:
    """Returns gradients in the dtypes of ``parameters``: multiplied, then limited; those given stay as they are."""
    pairs = zip(gradients, parameters, strict=True)
    # Asking first, because `to` takes a microsecond where there is nothing to do.
    values = [one if one.dtype == parameter.dtype else one.to(parameter.dtype) for one, parameter in pairs]
    if state is not None and values:
        values = list(torch._foreach_mul(values, state.multiplier.to(values[0].device, non_blocking=True)))
    if limit is not None:
        values = list(torch._foreach_clamp_max(values, limit))
        torch._foreach_clamp_min_(values, -limit)
    return values


def logarithms(*betas: float, corrects: bool) -> tuple[float, ...]:
    """Returns the logarithms of decay rates, with which 1 - beta**step is exact for every step; -inf for no bias correction."""
    return tuple([math.log(beta) if corrects and beta > 0 else -math.inf for beta in betas])


def corrections(steps: Sequence[Tensor], beta: float) -> Tensor:
    """Returns ``1 - beta**step`` for all steps (1-dim, fp64) without reading any."""
    (log,) = logarithms(beta, corrects=True)
    return (torch.stack(list(steps)).double() * log).expm1().neg()


def one_each(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the elements of ``values``, each in the dtype of its tensor."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return list(values.to(tensors[0].dtype).unbind())
    return [value.to(tensor.dtype) for value, tensor in zip(values.unbind(), tensors, strict=True)]


def unless_skipped(state: StepState | None, written: Sequence[Tensor], update: Callable[[], None]) -> None:
    """Runs ``update`` unless ``state.found_inf`` is set; decided without a wait where the flag is not on the host's side.

    There the update runs in any case, and all that it has ``written`` is put back where it should not have.
    """
    if state is None:
        update()
        return
    if state.words.device.type == "cpu":
        if not state.found_inf.item():
            update()
        return
    before = [tensor.clone() for tensor in written]
    update()
    skip = state.found_inf != 0
    for tensor, old in zip(written, before, strict=True):
        tensor.copy_(torch.where(skip.to(tensor.device), old, tensor))
