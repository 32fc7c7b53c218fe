"""What a progress bar shows between two flushes: the last values of steps, brought to the host beside the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.metrics import exchange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp.metrics.slots import MetricTable


class Glance:
    """This rank's own ``prog_bar`` values of steps, as of the last look that has arrived; a look waits for nothing."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._under_way: exchange.Snapshot | None = None

    def look(self, table: MetricTable) -> dict[str, float]:
        """Returns what has arrived of ``table``, and starts the next copy; on CPU that has arrived at once."""
        if self._under_way is None or self._arrives(self._under_way):
            self._under_way = exchange.take_own(table, 0)
            if self._under_way.event is None:
                self._arrives(self._under_way)
        return self.values

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the values of ``keys``: newer ones have been published."""
        for key in keys:
            self.values.pop(key, None)

    def _arrives(self, snapshot: exchange.Snapshot) -> bool:
        if snapshot.event is not None and not snapshot.event.query():
            return False
        for published, own in exchange.read_own(snapshot).contributions():
            if published.prog_bar and published.per_step and own.weight:
                self.values[published.key] = own.total
        return True
