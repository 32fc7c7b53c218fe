"""Lets torch's and other foreign optimizers skip a step, by torch's ``found_inf`` protocol if they support it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger("fabricamp")


def may_skip(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` can skip its next step on the device; creates the optimizer state that this needs."""
    return _skips_by_itself(optimizer) and _prepare_to_skip(optimizer)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Returns whether ``step`` reads ``found_inf`` on the device: torch's protocol for optimizers with ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )


def _prepare_to_skip(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer state for a skipped step exists or could be created.

    torch's fused SGD allocates its momentum buffers in the first step and leaves them uninitialised if that step is skipped.
    Without dampening, zeros give the same first step.  With dampening they do not, so the host has to decide until the buffers
    exist.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter].get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                return False
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return True


def run_unless_overflow(optimizer: Any, found_inf: Tensor, update: Callable[[], Any] | None = None) -> None:
    """Steps ``optimizer``, which reads ``found_inf`` on the device; calls ``update`` instead of ``optimizer.step`` if given.

    ``update`` is for an optimizer with a replaced ``step``.
    """
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        (update or optimizer.step)()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def leave_fused(optimizer: torch.optim.SGD, *, tell: bool) -> None:
    """Sets ``fused=False`` in SGD: on CPU, torch's fused SGD (seen in 2.13) does not update most half weights.

    Called in each step, because loading an optimizer's state restores the saved ``fused`` option.
    """
    for group in optimizer.param_groups:
        if group["fused"]:
            group["fused"] = False
            if tell:
                logger.warning("torch's SGD(fused=True) does not update half weights on CPU; fused=False is used")
                tell = False
