"""SyncBatchNorm: the function, its kernels, their layout, and the exchange of statistics between ranks."""
