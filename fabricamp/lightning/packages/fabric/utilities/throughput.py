"""``Throughput`` and ``ThroughputMonitor``: rates over the last batches, from numbers that a loop gives them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fabricamp.utilities import measure_flops

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["Throughput", "ThroughputMonitor", "measure_flops"]


class Throughput:
    """Computes batches, samples, items and operations a second over a window of calls of :meth:`update`.

    Args:
        available_flops: the device's peak of operations a second, for ``device/mfu``.
        world_size: the number of devices; with several, rates of all of them are computed too.
        window_size: how many calls a rate is over; there is none before.
        separator: what is between "device" and a name.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not allowed; give 1 or more")
        if window_size < 2:
            raise ValueError(f"window_size={window_size} is not allowed; give 2 or more")
        self._totals: dict[str, deque[float]] = {
            name: deque(maxlen=window_size) for name in ("time", "batches", "samples", "lengths")
        }
        self._flops: deque[float] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Takes the totals since the start (seconds, batches, samples, items), and the operations since the last call."""
        if samples < batches:
            raise ValueError(f"samples={samples} is fewer than batches={batches}")
        if lengths is not None and lengths < samples:
            raise ValueError(f"lengths={lengths} is fewer than samples={samples}")
        given = {"time": time, "batches": batches, "samples": samples}
        for name, value in (given if lengths is None else {**given, "lengths": lengths}).items():
            before = self._totals[name]
            if before and value <= before[-1]:
                raise ValueError(
                    f"{name}={value} is no more than the last one, {before[-1]}; give totals since the start"
                )
            before.append(value)
        if lengths is not None and len(self._totals["lengths"]) != len(self._totals["samples"]):
            raise RuntimeError("lengths came with some calls of update and not with others; give them in each")
        if flops is not None:
            # What the devices together have done.
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, Any]:
        """Returns the last totals, and the rates once the window is full."""
        totals = self._totals
        found: dict[str, Any] = {name: values[-1] for name, values in totals.items() if values}
        times = totals["time"]
        if len(times) < (times.maxlen or 0):
            return found
        seconds = times[-1] - times[0]
        of_totals = {"batches": "batches_per_sec", "samples": "samples_per_sec", "lengths": "items_per_sec"}
        for name, rate in of_totals.items():
            values = totals[name]
            if len(values) == values.maxlen:
                self._add(found, rate, (values[-1] - values[0]) / seconds)
        if len(self._flops) == self._flops.maxlen:
            of_device = (sum(self._flops) - self._flops[0]) / seconds / self.world_size
            self._add(found, "flops_per_sec", of_device)
            if self.available_flops:
                found[f"device{self.separator}mfu"] = of_device / self.available_flops
        return found

    def _add(self, found: dict[str, Any], name: str, of_device: float) -> None:
        found[f"device{self.separator}{name}"] = of_device
        if self.world_size > 1:
            found[name] = of_device * self.world_size

    def reset(self) -> None:
        """Forgets all calls."""
        for values in (*self._totals.values(), self._flops):
            values.clear()


class ThroughputMonitor(Throughput):
    """Throughput that logs by Fabric; the peak for ``device/mfu`` is given, as no table of devices is here."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        super().__init__(**{"world_size": fabric.world_size, **options})
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **options: Any) -> dict[str, Any]:
        """Logs what :meth:`compute` returns, at ``step`` or at the number of calls so far."""
        self.step = self.step + 1 if step is None else step
        found = self.compute()
        self._fabric.log_dict(found, self.step, **options)
        return found
