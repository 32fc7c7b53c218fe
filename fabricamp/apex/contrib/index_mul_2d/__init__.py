"""Multiplies rows of one matrix, chosen by an index, by rows of another."""

from fabricamp.apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d as index_mul_2d
