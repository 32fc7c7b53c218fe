"""Precisions (mixed precision, opt levels): they set a module's compute dtype, run backward, and make the update."""

from fabricamp.precision.base import PRECISIONS, Clip, Conversion, Precision
from fabricamp.precision.float8 import Float8
from fabricamp.precision.level import OptLevel
from fabricamp.precision.loss_scaler import StepStatus
from fabricamp.precision.named import precision_from, precision_name
from fabricamp.precision.optimizer_step import OptimizerStep

__all__ = [
    "PRECISIONS",
    "Clip",
    "Conversion",
    "Float8",
    "OptLevel",
    "OptimizerStep",
    "Precision",
    "StepStatus",
    "precision_from",
    "precision_name",
]
