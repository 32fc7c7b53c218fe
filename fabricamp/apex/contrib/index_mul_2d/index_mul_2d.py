"""apex's path to ``index_mul_2d``."""

from fabricamp.ops import index_mul_2d as index_mul_2d
