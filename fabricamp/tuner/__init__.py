"""Searches before a fit: for a learning rate, and for the largest batch size that fits into memory."""

from __future__ import annotations

from fabricamp.tuner.tuning import Tuner

__all__ = ["Tuner"]
