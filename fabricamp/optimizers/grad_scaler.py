"""Reads the attributes that torch's GradScaler sets on an optimizer for the duration of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp import ops

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def from_grad_scaler(optimizer: Optimizer, own: ops.StepState | None) -> ops.StepState | None:
    """Returns a step state with ``found_inf`` and the multiplier ``1 / grad_scale``, or None if neither attribute is set.

    The state is ``own`` if this is on the attributes' device, else a new one.  Without ``found_inf`` the step is not skipped;
    without ``grad_scale`` the multiplier is 1.
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
