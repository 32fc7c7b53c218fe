"""SyncBatchNorm where apex had it; there is one class."""

from fabricamp import nn


class SyncBatchNorm(nn.SyncBatchNorm):
    """:class:`fabricamp.nn.SyncBatchNorm` by apex's name."""
