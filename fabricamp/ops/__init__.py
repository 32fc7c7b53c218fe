"""Functions on lists of tensors, whose torch references run everywhere; all leave lr, scale and flags on the device."""

from __future__ import annotations

from fabricamp.ops.scaling import finish, update_scale
from fabricamp.ops.statistics import gradient_statistics, l2norm
from fabricamp.ops.step_state import StepState
from fabricamp.ops.tensors import accumulate, axpby, copy_cast, scale

__all__ = [
    "StepState",
    "accumulate",
    "axpby",
    "copy_cast",
    "finish",
    "gradient_statistics",
    "l2norm",
    "scale",
    "update_scale",
]
