"""``index_mul_2d`` where apex had it."""

from fabricamp.ops import index_mul_2d

__all__ = ["index_mul_2d"]
