"""The latest step values for a progress bar between two flushes, copied to the host asynchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.metrics import exchange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp.metrics.slots import MetricTable


class ProgressSnapshot:
    """This rank's own ``prog_bar`` step values, as of the last copy that has arrived; it never waits."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._under_way: exchange.Snapshot | None = None

    def look(self, table: MetricTable) -> dict[str, float]:
        """Returns the values of ``table`` that have arrived, and starts the next copy; on the CPU a copy arrives at once."""
        if self._under_way is None or self._arrives(self._under_way):
            self._under_way = exchange.take_own(table, 0)
            if self._under_way.event is None:
                self._arrives(self._under_way)
        return self.values

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the values of ``keys``, because newer ones were published."""
        for key in keys:
            self.values.pop(key, None)

    def _arrives(self, snapshot: exchange.Snapshot) -> bool:
        if snapshot.event is not None and not snapshot.event.query():
            return False
        for published, own in exchange.read_own(snapshot).contributions():
            if published.prog_bar and published.per_step and own.weight:
                self.values[published.key] = own.total
        return True
