"""Helpers of the torch references of the update ops: scaled gradients, wide arithmetic, skipped steps."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.ops.tensors import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState

_dtype: Final = attrgetter("dtype")


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of half tensors, and the other tensors themselves; the given list itself if no tensor is half."""
    if isinstance(tensors, list) and HALF_DTYPES.isdisjoint(map(_dtype, tensors)):
        return tensors
    return [tensor.float() if tensor.dtype in HALF_DTYPES else tensor for tensor in tensors]


def rounded(wide: Sequence[Tensor], narrow: Sequence[Tensor | None]) -> None:
    """Writes the values that :func:`widened` had to copy back into ``narrow``; entries that are None are skipped."""
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
    """Returns gradients in the dtypes of ``parameters``, multiplied, then clamped; the given tensors are not changed."""
    pairs = zip(gradients, parameters, strict=True)
    # Compares the dtypes first, because a `to` that has nothing to do takes a microsecond.
    values = [
        gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype) for gradient, parameter in pairs
    ]
    if state is not None and values:
        values = list(torch._foreach_mul(values, state.multiplier.to(values[0].device, non_blocking=True)))
    if limit is not None:
        values = list(torch._foreach_clamp_max(values, limit))
        torch._foreach_clamp_min_(values, -limit)
    return values


def logarithms(*betas: float, corrects: bool) -> tuple[float, ...]:
    """Returns the logarithms of decay rates: they make 1 - beta**step exact for every step.  -inf: no bias correction."""
    return tuple([math.log(beta) if corrects and beta > 0 else -math.inf for beta in betas])


def corrections(steps: Sequence[Tensor], beta: float) -> Tensor:
    """Returns ``1 - beta**step`` for all steps (1-dim, fp64) without a host read."""
    (log,) = logarithms(beta, corrects=True)
    return (torch.stack(list(steps)).double() * log).expm1().neg()


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each tensor (1-dim, fp64)."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))])


def one_each(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the elements of ``values``, each cast to the dtype of its tensor."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return list(values.to(tensors[0].dtype).unbind())
    return [value.to(tensor.dtype) for value, tensor in zip(values.unbind(), tensors, strict=True)]


def unless_skipped(state: StepState | None, written: Iterable[Tensor], update: Callable[[], None]) -> None:
    """Runs ``update`` unless ``state.found_inf`` is set.

    If the flag is on a device, the host does not wait for it: ``update`` always runs, and the tensors ``written``, which are asked
    for only then, get their old values back if the flag is set.
    """
    if state is None:
        update()
        return
    if state.words.device.type == "cpu":
        if not state.found_inf.item():
            update()
        return
    before = [(tensor, tensor.clone()) for tensor in written]
    update()
    skip = state.found_inf != 0
    for tensor, old in before:
        tensor.copy_(torch.where(skip.to(tensor.device), old, tensor))
