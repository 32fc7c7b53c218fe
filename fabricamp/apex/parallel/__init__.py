"""apex's distributed training: the wrapper, SyncBatchNorm, and the module LARC."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn import Module as AnyModule

from fabricamp import nn
from fabricamp.apex.parallel import LARC
from fabricamp.apex.parallel.distributed import DistributedDataParallel, Reducer
from fabricamp.apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
from fabricamp.nn import create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

Module = TypeVar("Module", bound="AnyModule")


def convert_syncbn_model(
    module: Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Module:
    """Does the same as :func:`fabricamp.nn.convert_syncbn_model`, with layers of this package's class :class:`SyncBatchNorm`."""
    result = nn.convert_syncbn_model(module, process_group, channel_last)
    for layer in result.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
    return result
