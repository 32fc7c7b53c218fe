"""Counts the floating-point operations of a step, to compare them with the device's peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def measure_flops(
    model: nn.Module,  # noqa: ARG001 - Lightning's signature; what forward_fn calls is counted
    forward_fn: Callable[[], Any],
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> int:
    """Returns the number of floating-point operations of ``forward_fn()``; with ``loss_fn`` those of the backward too.

    On the ``meta`` device the operations are counted but not computed.

    >>> with torch.device("meta"):
    ...     layer, batch = torch.nn.Linear(8, 4), torch.randn(2, 8)
    >>> measure_flops(layer, lambda: layer(batch))
    128
    """
    with FlopCounterMode(display=False) as counter:
        outputs = forward_fn()
        if loss_fn is not None:
            loss_fn(outputs).backward()
    return int(counter.get_total_flops())
