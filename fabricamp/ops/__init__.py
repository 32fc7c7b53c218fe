"""Functions on lists of tensors: CuPy kernels on a GPU, torch references elsewhere; lr, scale and flags stay on the device.

One op is one module here (the public function, its torch reference, its launch), one file in ``kernels/``, one test module.
"""

from __future__ import annotations

from fabricamp.ops.adam import AdamRule, adam
from fabricamp.ops.bridge import Backend, backend
from fabricamp.ops.scaling import finish, update_scale
from fabricamp.ops.statistics import gradient_statistics, l2norm
from fabricamp.ops.step_state import StepState
from fabricamp.ops.tensors import accumulate, axpby, copy_cast, scale

__all__ = [
    "AdamRule",
    "Backend",
    "StepState",
    "accumulate",
    "adam",
    "axpby",
    "backend",
    "copy_cast",
    "finish",
    "gradient_statistics",
    "l2norm",
    "scale",
    "update_scale",
]
