"""Modules with kernels of their own."""
