"""``self.log``: device slots, packed reduction over ranks, asynchronous flush."""

from fabricamp.metrics.collection import Metrics as Metrics
