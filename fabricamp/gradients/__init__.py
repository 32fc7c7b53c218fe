"""Gradients between backward and update: their memory, their sums, and the buckets they are exchanged in."""
