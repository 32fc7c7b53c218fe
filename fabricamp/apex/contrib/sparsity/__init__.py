"""Weights with two zeros in every four, which sparse tensor cores multiply at twice the speed."""

from fabricamp.apex.contrib.sparsity.asp import ASP as ASP
from fabricamp.apex.contrib.sparsity.sparse_masklib import create_mask as create_mask
