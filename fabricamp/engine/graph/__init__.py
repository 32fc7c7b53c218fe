"""The whole training step as one CUDA graph: captured once a shape of batch, replayed by a single call of the host."""
