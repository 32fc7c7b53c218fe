"""Lets optimizers without kernels of this package leave a step out, by torch's ``found_inf`` protocol where they follow it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger("fabricamp")


def may_skip(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` may skip its next step by itself, after it was given the state that this takes."""
    return _skips_by_itself(optimizer) and _prepare_to_skip(optimizer)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether ``step`` reads ``found_inf`` on the device: torch's protocol for optimizers with ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )


def _prepare_to_skip(optimizer: Optimizer) -> bool:
    """Whether the state that a skipped step needs is there, or could be made.

    torch's fused SGD allocates its momentum buffers in the first step and leaves them uninitialised where that one is skipped.
    Zeros make the same first step without dampening; with dampening they do not, and the host has to decide until the buffers
    are there.
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
    """Steps ``optimizer``, which reads ``found_inf`` on the device; ``update`` where its ``step`` is somebody else's by now."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        (update or optimizer.step)()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def leave_fused(optimizer: torch.optim.SGD, *, tell: bool) -> None:
    """Lets SGD take its plain path: on CPU, torch's fused one (seen in 2.13) leaves most half weights as they are.

    Looked at in each step, because loading an optimizer's state brings back the option that was saved.
    """
    for group in optimizer.param_groups:
        if group["fused"]:
            group["fused"] = False
            if tell:
                logger.warning("torch's SGD(fused=True) does not update half weights on CPU; fused=False is used")
                tell = False
