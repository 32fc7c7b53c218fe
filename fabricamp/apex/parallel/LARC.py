"""LARC where apex had it."""

from __future__ import annotations

from fabricamp.optimizers import LARC

__all__ = ["LARC"]
