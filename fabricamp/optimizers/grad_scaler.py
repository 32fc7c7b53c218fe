"""What torch's GradScaler hands to an optimizer, in attributes that exist for the length of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp import ops

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def from_grad_scaler(optimizer: Optimizer, own: ops.StepState | None) -> ops.StepState | None:
    """Returns ``found_inf`` and ``1 / grad_scale`` as a step reads them, in ``own`` where that is on their device.

    None where neither was handed over; one alone leaves no gradient out, or unscales none.
    """
    attributes = vars(optimizer)
    found_inf: Tensor | None = attributes.get("found_inf")
    scale: Tensor | None = attributes.get("grad_scale")
    given = found_inf if found_inf is not None else scale
    if given is None:
        return None
    state = own if own is not None and own.words.device == given.device else ops.StepState.on(given.device)
    if found_inf is None:
        state.found_inf.zero_()
    else:
        state.found_inf.copy_(found_inf.reshape(()))
    if scale is None:
        state.multiplier.fill_(1.0)
    else:
        state.multiplier.copy_(scale.reshape(()).reciprocal())
    return state
