"""apex's multi-layer perceptron."""

from __future__ import annotations

from fabricamp.apex.mlp.mlp import MLP

__all__ = ["MLP"]
