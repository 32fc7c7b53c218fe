"""apex's distributed training: the wrapper, SyncBatchNorm, LARC."""

from __future__ import annotations

from torch.distributed import ReduceOp

from fabricamp.apex.parallel.LARC import LARC
from fabricamp.nn import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from fabricamp.strategies.scripts import DistributedDataParallel, Reducer

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
