"""Fused modules: norms, SyncBatchNorm and losses with their own kernels, and conversions to them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricamp.nn.conversion import convert_syncbn_model as convert_syncbn_model
    from fabricamp.nn.conversion import create_syncbn_process_group as create_syncbn_process_group
    from fabricamp.nn.conversion import fuse as fuse
    from fabricamp.nn.conversion import revert_syncbn_model as revert_syncbn_model
    from fabricamp.nn.losses import FusedLinearCrossEntropy as FusedLinearCrossEntropy
    from fabricamp.nn.losses import SoftmaxCrossEntropyLoss as SoftmaxCrossEntropyLoss
    from fabricamp.nn.norms import FusedLayerNorm as FusedLayerNorm
    from fabricamp.nn.norms import FusedRMSNorm as FusedRMSNorm
    from fabricamp.nn.norms import MixedFusedLayerNorm as MixedFusedLayerNorm
    from fabricamp.nn.norms import MixedFusedRMSNorm as MixedFusedRMSNorm
    from fabricamp.nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

_HOMES = {
    "FusedLayerNorm": "fabricamp.nn.norms",
    "FusedLinearCrossEntropy": "fabricamp.nn.losses",
    "FusedRMSNorm": "fabricamp.nn.norms",
    "MixedFusedLayerNorm": "fabricamp.nn.norms",
    "MixedFusedRMSNorm": "fabricamp.nn.norms",
    "SoftmaxCrossEntropyLoss": "fabricamp.nn.losses",
    "SyncBatchNorm": "fabricamp.nn.sync_batch_norm",
    "convert_syncbn_model": "fabricamp.nn.conversion",
    "create_syncbn_process_group": "fabricamp.nn.conversion",
    "fuse": "fabricamp.nn.conversion",
    "revert_syncbn_model": "fabricamp.nn.conversion",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a model pays only for the modules that it uses.
    if name not in _HOMES:
        raise AttributeError(f"module 'fabricamp.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
