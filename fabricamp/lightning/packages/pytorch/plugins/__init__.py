# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.plugins``."""

from fabricamp.lightning.packages.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from fabricamp.lightning.packages.pytorch.plugins.io import AsyncCheckpointIO as AsyncCheckpointIO
from fabricamp.lightning.packages.pytorch.plugins.io import CheckpointIO as CheckpointIO
from fabricamp.lightning.packages.pytorch.plugins.io import TorchCheckpointIO as TorchCheckpointIO
from fabricamp.lightning.packages.pytorch.plugins.io import XLACheckpointIO as XLACheckpointIO
from fabricamp.lightning.packages.pytorch.plugins.layer_sync import LayerSync as LayerSync
from fabricamp.lightning.packages.pytorch.plugins.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm
from fabricamp.lightning.packages.pytorch.plugins.precision import BitsandbytesPrecision as BitsandbytesPrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import DeepSpeedPrecision as DeepSpeedPrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import DoublePrecision as DoublePrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import FSDPPrecision as FSDPPrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import HalfPrecision as HalfPrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import MixedPrecision as MixedPrecision
from fabricamp.lightning.packages.pytorch.plugins.precision import Precision as Precision
from fabricamp.lightning.packages.pytorch.plugins.precision import (
    TransformerEnginePrecision as TransformerEnginePrecision,
)
from fabricamp.lightning.packages.pytorch.plugins.precision import XLAPrecision as XLAPrecision

__all__ = [
    "AsyncCheckpointIO",
    "BitsandbytesPrecision",
    "CheckpointIO",
    "ClusterEnvironment",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
]
