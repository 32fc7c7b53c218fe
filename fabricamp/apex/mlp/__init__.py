# Written by tools/write_aliases.py
"""apex's multi-layer perceptron."""

from fabricamp.apex.mlp.mlp import MLP as MLP
