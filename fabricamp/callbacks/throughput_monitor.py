"""Logs the speed of training: :class:`StepTimer` measures steps without waiting for the device, the callback logs.

The table of cards is at the end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fabricamp._utils.containers import batch_length
from fabricamp.arguments.checks import check_number
from fabricamp.callbacks.base import Callback
from fabricamp.callbacks.device_stats_monitor import is_due
from fabricamp.errors import ConfigError
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabricamp._utils.types import AnyBatch, AnyOutput
    from fabricamp.data import Feed
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_PERCENTILES = (50, 90, 99)


class TimedLaunch(NamedTuple):
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


class StepTimer:
    """Measures the last ``window`` steps on ``device``."""

    def __init__(self, device: torch.device, window: int) -> None:
        self._launches: deque[TimedLaunch] = deque()
        self._window = window
        self._held = 0  # number of steps in these launches
        self._device = device
        self._feed: Feed | None = None
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
        self._batches += 1
        self._samples += samples
        self._items += items

    def end_step(self, steps: int = 1) -> None:
        """Marks the end of a step, or of the ``steps`` of one launch, and the beginning of the next."""
        mark = self._mark()
        seconds = time.perf_counter() - self._host
        self._launches.append(
            TimedLaunch(steps, self._start, mark, seconds, self._reading, self._batches, self._samples, self._items)
        )
        self._held += steps
        while self._held - self._launches[0].steps >= self._window:
            self._held -= self._launches.popleft().steps
        self._begin_at(mark)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context that measures the wait for a batch."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._reading += time.perf_counter() - before

    def done(self) -> list[tuple[TimedLaunch, float]]:
        """Returns the launches that the device has finished, each with its seconds on the device; never waits."""
        launches = list(self._launches)
        if self._device.type != "cuda":
            return [(launch, launch.end - launch.begin) for launch in launches]
        while launches and not launches[-1].end.query():
            launches.pop()
        return [(launch, launch.begin.elapsed_time(launch.end) / 1e3) for launch in launches]

    def _begin_at(self, mark: object) -> None:
        self._start = mark
        self._host = time.perf_counter()
        self._reading = 0.0
        self._batches = 0
        self._samples = 0
        self._items = 0

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream_in_use(self._device))
        return event


class ThroughputMonitor(Callback):
    """Logs samples per second, step times, waiting for data, FLOPs and memory, every ``log_every_n_steps`` steps.

    Names: ``train/device/samples_per_sec``, ``batches_per_sec``, ``items_per_sec``, ``flops_per_sec`` and ``mfu`` of one device;
    with several devices also ``train/samples_per_sec`` and so on of all, assuming that each does as much as rank 0's;
    ``train/step_ms_p50``, ``_p90`` and ``_p99``; ``train/data_share``, the share of the host's time spent waiting for batches; on
    a GPU ``train/memory/peak_bytes`` and ``reserved_bytes`` (the allocator's pool).

    Steps on a GPU are timed by events, which are read only after they have completed, so the host never waits.  Validation does
    not count.  Steps of one launch (``CudaGraph(steps=...)``) are timed together, and count as equally long.
    FLOPs are those of the first batch, counted by ``torch.utils.flop_counter``, or the module's ``flops_per_batch``.

    Args:
        batch_size_fn: returns the number of samples in a batch, an int; None takes the length of its first tensor that has a
            dimension.
        length_fn: returns the number of items (tokens) in a batch, an int; None logs no items.
        window_size: number of last steps that the values cover.
        separator: the text between the parts of a name.
        available_flops: the device's FLOPs per second, for ``mfu``; None uses a table of cards.

    Raises:
        ConfigError: if there is no logger, or a function returns no int.

    Example:
        >>> monitor = ThroughputMonitor(length_fn=lambda batch: batch["tokens"].numel())
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
    ) -> None:
        super().__init__()
        for name, function in {"batch_size_fn": batch_size_fn, "length_fn": length_fn}.items():
            if function is not None and not callable(function):
                raise ConfigError(f"ThroughputMonitor({name}={function!r}): give a function of a batch, or None")
        self.batch_size_fn = batch_size_fn or _length
        self.length_fn = length_fn
        self.window_size = check_number("ThroughputMonitor: window_size", window_size, least=1)
        self.separator = separator
        self.available_flops = available_flops
        self.flops_per_batch: int | None = None
        """FLOPs of one micro-batch: forward, backward and update."""
        self._pace: StepTimer | None = None  # on rank 0, while a fit runs
        self._counter: FlopCounterMode | None = None
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises :class:`ConfigError` if there is no logger."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.is_global_zero and not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigError("ThroughputMonitor needs a logger: Trainer(logger=True), or leave the callback out")

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Starts to measure time, on rank 0."""
        self._step = trainer.global_step
        self._pace = None
        self.flops_per_batch = getattr(pl_module, "flops_per_batch", None)
        if trainer.is_global_zero:
            self._pace = StepTimer(trainer.strategy.device, self.window_size)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Measures the wait for batches from here on; each epoch may have its own loader."""
        if self._pace is not None:
            self._pace.follow(trainer.train_feed)

    def holds_at(self, global_step: int) -> float:
        """Returns inf: a launch of several steps is timed as a unit."""
        return math.inf

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Starts to count FLOPs in the first batch."""
        if self.flops_per_batch is None and self._pace is not None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Ends the count of FLOPs, or records the time of a step."""
        pace = self._pace
        if pace is None:
            return
        samples = _counted("batch_size_fn", self.batch_size_fn(batch))
        items = 0 if self.length_fn is None else _counted("length_fn", self.length_fn(batch))
        step = trainer.global_step
        if self._counter is not None:  # counting takes time, so this batch is not timed
            self.flops_per_batch = self._end_count()
            self._step = step
            pace.begin()
            return
        pace.count(samples, items)
        # The batch hooks of a launch's steps run after it, in order: only the last one ends its measurement.
        if step == self._step or trainer.state.batches_done < trainer.state.committed:
            return
        pace.end_step(step - self._step)
        self._step = step
        if is_due(trainer, step):
            self._log(trainer, pace)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Excludes the time of validation."""
        if self._pace is not None:
            self._pace.begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Ends a count of FLOPs whose batch was skipped."""
        self._end_count()

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Ends a count of FLOPs whose batch failed."""
        self._end_count()

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Releases the events."""
        self._pace = None

    def _end_count(self) -> int:
        counter = self._counter
        self._counter = None
        if counter is None:
            return 0
        counter.__exit__(None, None, None)
        return counter.get_total_flops()

    def _log(self, trainer: Trainer, pace: StepTimer) -> None:
        """Logs the values over the measured launches that the device has finished; nothing if there are none."""
        launches = pace.done()
        seconds = sum(on_device for _, on_device in launches)
        host_seconds = sum(launch.seconds for launch, _ in launches)
        if not seconds or not host_seconds:
            return
        rates = {
            name: sum(getattr(launch, name) for launch, _ in launches) / seconds
            for name in ("batches", "samples", "items")
        }
        if self.length_fn is None:
            del rates["items"]
        values = {f"device/{name}_per_sec": rate for name, rate in rates.items()}
        if trainer.world_size > 1:
            # By data_ranks, because ranks with tensor parallelism compute the same samples.
            values |= {f"{name}_per_sec": trainer.strategy.data_ranks * rate for name, rate in rates.items()}
        times: list[float] = []
        for launch, on_device in launches:
            times += [1e3 * on_device / launch.steps] * launch.steps
        values |= {f"step_ms_p{share}": percentile(times, share / 100) for share in _PERCENTILES}
        values["data_share"] = sum(launch.reading for launch, _ in launches) / host_seconds
        values |= self._flops(trainer, rates["batches"]) | _memory(trainer)
        names = {f"train/{name}".replace("/", self.separator): value for name, value in values.items()}
        # Logger steps are numbered from 0.
        trainer.delivery.log_metrics(names, trainer.global_step - 1)

    def _flops(self, trainer: Trainer, batches_per_sec: float) -> dict[str, float]:
        if not self.flops_per_batch:
            return {}
        flops = self.flops_per_batch * batches_per_sec
        available = self.available_flops
        if available is None:
            level: Any = getattr(trainer.precision_plugin, "level", None)
            dtype = None if level is None else level.autocast or level.cast_model_type
            available = peak_flops(trainer.strategy.device, dtype or torch.float32)
        values = {"device/flops_per_sec": flops}
        if available:
            values["device/mfu"] = flops / available
        return values


def _memory(trainer: Trainer) -> dict[str, float]:
    device = trainer.strategy.device
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "memory/peak_bytes": max(trainer.state.peak_bytes, stats["allocated_bytes.all.peak"]),
        "memory/reserved_bytes": stats["reserved_bytes.all.current"],
    }


def _counted(name: str, value: object) -> int:
    """Returns ``value``; raises :class:`ConfigError` unless it is an int: the host would wait for a tensor."""
    if isinstance(value, Tensor) or not isinstance(value, int):
        raise ConfigError(
            f"ThroughputMonitor({name}=...) returned a {type(value).__name__}; return an int, such as batch.shape[0] or "
            "batch.numel(), which the host does not wait for"
        )
    return value


def _length(batch: AnyBatch) -> int:
    length = batch_length(batch)
    if length is None:
        raise ConfigError(
            f"ThroughputMonitor finds no tensor in a batch that is a {type(batch).__name__}; give it batch_size_fn="
        )
    return length


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
    peaks = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    if peaks is None:
        return None
    half, tf32, full = peaks
    if dtype is torch.float32:
        return 1e12 * (tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else full)
    return 1e12 * half


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
