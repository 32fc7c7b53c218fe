"""Optimizers with kernels of their own."""
