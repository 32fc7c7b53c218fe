# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.plugins``."""

from fabricamp.lightning.packages.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from fabricamp.lightning.packages.fabric.plugins.io import CheckpointIO as CheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io import TorchCheckpointIO as TorchCheckpointIO
from fabricamp.lightning.packages.fabric.plugins.io import XLACheckpointIO as XLACheckpointIO
from fabricamp.lightning.packages.fabric.plugins.precision import BitsandbytesPrecision as BitsandbytesPrecision
from fabricamp.lightning.packages.fabric.plugins.precision import DeepSpeedPrecision as DeepSpeedPrecision
from fabricamp.lightning.packages.fabric.plugins.precision import DoublePrecision as DoublePrecision
from fabricamp.lightning.packages.fabric.plugins.precision import FSDPPrecision as FSDPPrecision
from fabricamp.lightning.packages.fabric.plugins.precision import HalfPrecision as HalfPrecision
from fabricamp.lightning.packages.fabric.plugins.precision import MixedPrecision as MixedPrecision
from fabricamp.lightning.packages.fabric.plugins.precision import Precision as Precision
from fabricamp.lightning.packages.fabric.plugins.precision import (
    TransformerEnginePrecision as TransformerEnginePrecision,
)
from fabricamp.lightning.packages.fabric.plugins.precision import XLAPrecision as XLAPrecision

__all__ = [
    "BitsandbytesPrecision",
    "CheckpointIO",
    "ClusterEnvironment",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
]
