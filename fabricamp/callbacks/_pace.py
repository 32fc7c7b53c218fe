"""Measures how long steps take, without waiting for the device."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp.data import Feed

PEAKS = {
    "B200": (2250.0, 1125.0, 75.0),
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.0, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "A30": (165.0, 82.0, 10.3),
    "A40": (149.7, 74.8, 37.4),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
}
"""The vendor's TFLOP/s of dense half, TF32 and fp32 matrix products, by a substring of the card's name."""


class Step(NamedTuple):
    """One step, or the ``steps`` of one launch.

    ``begin`` and ``end`` are CUDA events, or seconds on the CPU.  ``seconds`` is the host's time; ``reading`` is the part of it
    spent waiting for batches.
    """

    steps: int
    begin: Any
    end: Any
    seconds: float
    reading: float
    batches: int
    samples: int
    items: int


class Pace:
    """Measures the last ``window`` steps on ``device``."""

    def __init__(self, device: torch.device, window: int) -> None:
        self.steps: deque[Step] = deque()
        self._window, self._held = window, 0
        self._device = device
        self._feed: Feed | None = None
        self._counts = (0, 0, 0)
        self.begin()

    def follow(self, feed: Feed) -> None:
        """Measures the time spent waiting for batches of ``feed``; registers only once per feed."""
        if feed is not self._feed:
            self._feed = feed
            feed.watch(self.reading)

    def begin(self) -> None:
        """Marks the beginning of the next step."""
        self._begin_at(self._mark())

    def count(self, samples: int, items: int) -> None:
        """Counts one micro-batch with its samples and items."""
        batches, before, items_before = self._counts
        self._counts = (batches + 1, before + samples, items_before + items)

    def end_step(self, steps: int = 1) -> None:
        """Marks the end of a step, or of the ``steps`` of one launch, and the beginning of the next."""
        mark, seconds = self._mark(), time.perf_counter() - self._host
        self.steps.append(Step(steps, self._start, mark, seconds, self._reading, *self._counts))
        self._held += steps
        while self._held - self.steps[0].steps >= self._window:
            self._held -= self.steps.popleft().steps
        self._begin_at(mark)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context that measures the wait for a batch."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._reading += time.perf_counter() - before

    def done(self) -> list[tuple[Step, float]]:
        """Returns the launches that the device has finished, each with its seconds on the device; never waits."""
        steps = list(self.steps)
        if self._device.type != "cuda":
            return [(one, one.end - one.begin) for one in steps]
        while steps and not steps[-1].end.query():
            steps.pop()
        return [(one, one.begin.elapsed_time(one.end) / 1e3) for one in steps]

    def _begin_at(self, mark: Any) -> None:
        self._start, self._host, self._reading = mark, time.perf_counter(), 0.0
        self._counts = (0, 0, 0)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream_in_use(self._device))
        return event


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value such that at least the fraction ``share`` of ``values`` is less than or equal to it.

    >>> [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.5, 0.9)]
    [2.0, 4.0]
    """
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the vendor's operations per second for matrix products of ``dtype``; None if the card is not in ``PEAKS``."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    if found is None:
        return None
    half, tf32, full = found
    if dtype is torch.float32:
        return 1e12 * (tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else full)
    return 1e12 * half
