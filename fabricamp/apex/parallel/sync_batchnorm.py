"""apex's path to SyncBatchNorm; there is one class."""

from fabricamp.apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
