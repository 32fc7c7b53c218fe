"""The optimizers of apex.contrib: the old FusedAdam and FP16_Optimizer; the others are those of ``apex.optimizers``."""

from __future__ import annotations

from typing import Final

from fabricamp.apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from fabricamp.apex.contrib.optimizers.fused_adam import FusedAdam
from fabricamp.apex.optimizers import FusedLAMB, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]

_NOT_OFFERED: Final = (
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
    "distributed_fused_adam",
    "distributed_fused_lamb",
)


def __getattr__(name: str) -> object:
    if name in _NOT_OFFERED:
        raise AttributeError(
            f"fabricamp.apex.contrib.optimizers has no {name}; use torch.distributed.optim.ZeroRedundancyOptimizer or "
            "torch.distributed.fsdp (fabricamp help from-apex)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
