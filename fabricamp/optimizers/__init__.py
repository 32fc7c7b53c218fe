"""Fused optimizers: torch Optimizers with their own kernels; the step is one pass over memory."""

from fabricamp.optimizers.adagrad import FusedAdagrad
from fabricamp.optimizers.adam import FusedAdam
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.lamb import FusedLAMB
from fabricamp.optimizers.larc import LARC
from fabricamp.optimizers.lion import FusedLion
from fabricamp.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb
from fabricamp.optimizers.novograd import FusedNovoGrad
from fabricamp.optimizers.refusals import UnsupportedError
from fabricamp.optimizers.sgd import FusedSGD

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedSGD",
    "UnsupportedError",
]
