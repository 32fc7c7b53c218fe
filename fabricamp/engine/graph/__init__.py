"""The complete training step as one CUDA graph: captured once per batch shape, replayed by a single call of the host."""
