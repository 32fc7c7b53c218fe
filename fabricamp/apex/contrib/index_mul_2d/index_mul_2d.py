"""``index_mul_2d`` where apex had it."""

from fabricamp.ops import index_mul_2d as index_mul_2d
