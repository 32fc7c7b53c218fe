"""Weights with two zeros in four, which sparse tensor cores run at twice the speed."""

from fabricamp.apex.contrib.sparsity.asp import ASP as ASP
from fabricamp.apex.contrib.sparsity.sparse_masklib import create_mask as create_mask
