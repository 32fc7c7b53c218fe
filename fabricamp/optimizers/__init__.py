"""Optimizers with kernels of their own: torch Optimizers whose step is one pass over memory."""

from __future__ import annotations

from fabricamp.optimizers.adagrad import FusedAdagrad
from fabricamp.optimizers.adam import FusedAdam
from fabricamp.optimizers.base import FusedOptimizer, UnsupportedError

__all__ = ["FusedAdam", "FusedOptimizer", "UnsupportedError"]
