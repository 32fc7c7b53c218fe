"""Exponential moving averages of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import rounded, unless_skipped
from fabricamp.ops.remainders import wide_values
from fabricamp.ops.table import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.ops.step_state import StepState


@torch.no_grad()
def ema(
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    decay: float | Tensor,
    *,
    state: StepState | None = None,
    remainders: Sequence[Tensor] | None = None,
) -> None:
    """Sets each of ``averages`` to ``decay * average + (1 - decay) * parameter``, computed in at least fp32.

    ``remainders``: the bits (int16) that the parameters, then bf16, lack.
    A ``decay`` in device memory may change between replays of a captured step (fp64 keeps all digits of a decay near 1).
    If ``state.found_inf`` is set, because the preceding step was skipped, nothing changes.
    """
    if not parameters:
        return
    if runs_kernels(averages[0].device):
        table = table_of(parameters, averages, *([] if remainders is None else [remainders]))
        words = None if state is None else state.words
        if isinstance(decay, torch.Tensor):
            table.launch("ema", "ema", words, decay.to(table.device, torch.float64), 0.0)
        else:
            table.launch("ema", "ema", words, None, float(decay))
        return
    values = wide_values(parameters, remainders) if remainders is not None else parameters
    unless_skipped(state, averages, lambda: _reference(values, averages, decay))


def _reference(parameters: Sequence[Tensor], averages: Sequence[Tensor], decay: float | Tensor) -> None:
    pairs = list(zip(parameters, averages, strict=True))
    dtypes = [torch.promote_types(_wide(parameter), _wide(average)) for parameter, average in pairs]
    values = [parameter.to(dtype) for (parameter, _), dtype in zip(pairs, dtypes, strict=True)]
    wide = [average.to(dtype) for (_, average), dtype in zip(pairs, dtypes, strict=True)]
    if isinstance(decay, torch.Tensor):
        weight = 1 - decay.to(averages[0].device, torch.float64)
        for average, value in zip(wide, values, strict=True):
            average.lerp_(value, weight.to(average.dtype))
    else:
        torch._foreach_lerp_(wide, values, 1 - decay)
    rounded(wide, averages)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
