"""Lightning's path to the base of callbacks."""

from __future__ import annotations

from fabricamp.callbacks.base import Callback

__all__ = ["Callback"]
