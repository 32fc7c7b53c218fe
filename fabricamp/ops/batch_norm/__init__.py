"""SyncBatchNorm: the function, the kernels, their layout, and the exchange of statistics between ranks."""
