"""``self.log``: device slots, packed reduction over ranks, asynchronous flush."""

from __future__ import annotations

from fabricamp.metrics.collection import Metrics

__all__ = ["Metrics"]
