"""apex's path to SyncBatchNorm; there is one class."""

from fabricamp import nn


class SyncBatchNorm(nn.SyncBatchNorm):
    """:class:`fabricamp.nn.SyncBatchNorm` under apex's name."""
