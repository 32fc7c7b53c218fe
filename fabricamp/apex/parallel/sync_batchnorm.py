"""SyncBatchNorm where apex had it; there is one class."""

from __future__ import annotations

from fabricamp.apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
