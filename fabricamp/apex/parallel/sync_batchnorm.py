"""SyncBatchNorm where apex had it; there is one class."""

from __future__ import annotations

from fabricamp.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
