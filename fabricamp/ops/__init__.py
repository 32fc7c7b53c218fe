"""Functions on lists of tensors: CuPy kernels on a GPU, torch references elsewhere; lr, scale and flags stay on the device.

Each op has one module here (the public function, its torch reference, its launch) and one test module.  Kernels are in
``kernels/``, those of the norms and of SyncBatchNorm in folders beside their modules.
"""

from fabricamp.ops.adagrad import AdagradRule as AdagradRule
from fabricamp.ops.adagrad import adagrad as adagrad
from fabricamp.ops.adam import AdamRule as AdamRule
from fabricamp.ops.adam import adam as adam
from fabricamp.ops.batch_norm.sync_batch_norm import sync_batch_norm as sync_batch_norm
from fabricamp.ops.bridge import Backend as Backend
from fabricamp.ops.clipping import clip_grad_norm_ as clip_grad_norm_
from fabricamp.ops.cross_entropy import fused_cross_entropy as fused_cross_entropy
from fabricamp.ops.dispatch import backend as backend
from fabricamp.ops.dispatch import set_kernel_choice as set_kernel_choice
from fabricamp.ops.ema import ema as ema
from fabricamp.ops.focal_loss import focal_loss as focal_loss
from fabricamp.ops.gather import Gather as Gather
from fabricamp.ops.index_mul_2d import index_mul_2d as index_mul_2d
from fabricamp.ops.lamb import LambRule as LambRule
from fabricamp.ops.lamb import lamb as lamb
from fabricamp.ops.larc import LarcRule as LarcRule
from fabricamp.ops.larc import larc as larc
from fabricamp.ops.linear_cross_entropy import fused_linear_cross_entropy as fused_linear_cross_entropy
from fabricamp.ops.lion import LionRule as LionRule
from fabricamp.ops.lion import lion as lion
from fabricamp.ops.norm.normalization import layer_norm as layer_norm
from fabricamp.ops.norm.normalization import rms_norm as rms_norm
from fabricamp.ops.novograd import NovoGradRule as NovoGradRule
from fabricamp.ops.novograd import novograd as novograd
from fabricamp.ops.rules import Rows as Rows
from fabricamp.ops.rules import Rule as Rule
from fabricamp.ops.rules import Steering as Steering
from fabricamp.ops.rules import update as update
from fabricamp.ops.scaling import ScaleRule as ScaleRule
from fabricamp.ops.scaling import finish as finish
from fabricamp.ops.scaling import update_scale as update_scale
from fabricamp.ops.sgd import SgdRule as SgdRule
from fabricamp.ops.sgd import sgd as sgd
from fabricamp.ops.statistics import gradient_statistics as gradient_statistics
from fabricamp.ops.statistics import l2norm as l2norm
from fabricamp.ops.statistics import place_of_statistic as place_of_statistic
from fabricamp.ops.step_state import StepState as StepState
from fabricamp.ops.tensors import accumulate as accumulate
from fabricamp.ops.tensors import axpby as axpby
from fabricamp.ops.tensors import copy_cast as copy_cast
from fabricamp.ops.tensors import scale as scale
