"""Functions on lists of tensors: CuPy kernels on a GPU, torch references elsewhere; lr, scale and flags stay on the device.

One op is one module here (the public function, its torch reference, its launch), one file in ``kernels/``, one test module.
"""

from fabricamp.ops.adagrad import AdagradRule, adagrad
from fabricamp.ops.adam import AdamRule, adam
from fabricamp.ops.batch_norm.sync_batch_norm import sync_batch_norm
from fabricamp.ops.bridge import Backend
from fabricamp.ops.clipping import clip_grad_norm_
from fabricamp.ops.cross_entropy import fused_cross_entropy
from fabricamp.ops.dispatch import backend
from fabricamp.ops.ema import ema
from fabricamp.ops.focal_loss import focal_loss
from fabricamp.ops.gather import Gather
from fabricamp.ops.index_mul_2d import index_mul_2d
from fabricamp.ops.lamb import LambRule, lamb
from fabricamp.ops.larc import LarcRule, larc
from fabricamp.ops.lion import LionRule, lion
from fabricamp.ops.norm.normalization import layer_norm, rms_norm
from fabricamp.ops.novograd import NovoGradRule, novograd
from fabricamp.ops.rules import Rows, Rule, Steering, update
from fabricamp.ops.scaling import ScaleRule, finish, update_scale
from fabricamp.ops.sgd import SgdRule, sgd
from fabricamp.ops.statistics import gradient_statistics, l2norm, place_of_statistic
from fabricamp.ops.step_state import StepState
from fabricamp.ops.tensors import accumulate, axpby, copy_cast, scale

__all__ = [
    "AdagradRule",
    "AdamRule",
    "Backend",
    "Gather",
    "LambRule",
    "LarcRule",
    "LionRule",
    "NovoGradRule",
    "Rows",
    "Rule",
    "ScaleRule",
    "SgdRule",
    "Steering",
    "StepState",
    "accumulate",
    "adagrad",
    "adam",
    "axpby",
    "backend",
    "clip_grad_norm_",
    "copy_cast",
    "ema",
    "finish",
    "focal_loss",
    "fused_cross_entropy",
    "gradient_statistics",
    "index_mul_2d",
    "l2norm",
    "lamb",
    "larc",
    "layer_norm",
    "lion",
    "novograd",
    "place_of_statistic",
    "rms_norm",
    "scale",
    "sgd",
    "sync_batch_norm",
    "update",
    "update_scale",
]
