"""apex's multi-layer perceptron."""

from fabricamp.apex.mlp.mlp import MLP as MLP
