"""Where the time of a fit goes, as far as the host knows it without waiting for a device.

:class:`TimeSpent` counts what the run waits for: data, validations, saves.  What is left is the time of the steps; the parts of a
step (host, device, exchange) are not known without waits, and :mod:`fabricamp.commands.bench` measures them.
"""

from __future__ import annotations

import contextlib
import os
from time import perf_counter
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabricamp.agenda import Entry, Position
from fabricamp.callbacks._renderers import duration
from fabricamp.data import leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fabricamp._utils.types import Batch, Loader
    from fabricamp.agenda import PassEnd
    from fabricamp.engine.loop import FitParts

FIRST_LOOK = 50
"""The number of steps after which slow data are told; it is looked again at ten times as many, and so on."""
_SLOW = 0.5
"""The share of the time from which on data are slow."""
_LEAST_SECONDS = 1.0
"""Waits that are shorter altogether are not told: a short run on tiny batches is over before its author could do anything."""
_VERDICT_SECONDS = 10.0


class TimeSpent:
    """Counts the seconds of a fit on this rank; a batch costs two looks at the clock.

    Parts that end before the training are parts of the start.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._trains_since = self._began
        self._begun = False
        self._data = 0.0
        self._first_batches = 0.0
        self._parts = {"validation": 0.0, "saves": 0.0}
        self._of_start: dict[str, float] = {}
        self._within = 0.0  # seconds of the parts within the one that is counted now

    def _begin(self, read_since: float) -> None:
        """Begins to count the training, when the first batch is here: loader workers, and what was before, are the start.

        ``read_since``: when the loader was asked for that batch.
        """
        self._begun = True
        self._trains_since = perf_counter()
        self._of_start = {**self._parts, "the first batch": self._trains_since - read_since}
        self._parts = {"validation": 0.0, "saves": 0.0}

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields an epoch's ``batches``, and counts the waits for them."""
        began = perf_counter()
        is_first = True
        for batch in batches:
            if is_first:
                is_first = False
                if self._begun:
                    self._first_batches += perf_counter() - began
                else:
                    self._begin(began)
                    began = self._trains_since
            self._data += perf_counter() - began
            yield batch
            del batch
            began = perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose time counts as ``name``, without that of a part within it (a save after a validation)."""
        outer = self._within
        self._within = 0.0
        began = perf_counter()
        try:
            yield
        finally:
            whole = perf_counter() - began
            self._parts[name] = self._parts.get(name, 0.0) + whole - self._within
            self._within = outer + whole

    @property
    def waited(self) -> float:
        """The seconds of training in which the host waited for data; a GPU may have had work meanwhile."""
        return self._data

    @property
    def training(self) -> float:
        """The seconds since training began, without validations and saves."""
        return perf_counter() - self._trains_since - sum(self._parts.values())

    @property
    def waits_at_epochs(self) -> bool:
        """Whether most of the waits are those for the first batch of an epoch."""
        return 2 * self._first_batches > self._data

    def verdict(self) -> str:
        """Returns how the time divides, largest share first; an empty string for less than ten seconds of training."""
        now = perf_counter()
        whole = now - self._began
        if not self._begun or now - self._trains_since < _VERDICT_SECONDS:
            return ""
        waited = self.waited
        seconds = {
            "steps": self.training - waited,
            "data": waited,
            **self._parts,
            "start": self._trains_since - self._began,
        }
        shares = sorted(((100 * part / whole, name) for name, part in seconds.items()), reverse=True)
        told = [f"{name} {share:.0f} %" for share, name in shares if share >= 0.5]
        if shares[0][1] == "start":
            told[0] += self._what_start_was(seconds["start"])
        return f"{duration(whole)} in all: " + ", ".join(told)

    def _what_start_was(self, seconds: float) -> str:
        """Returns, in parentheses, the parts that took a tenth or more of the ``seconds`` before the training, longest first."""
        parts = sorted(((part, name) for name, part in self._of_start.items() if 10 * part >= seconds), reverse=True)
        return f" ({', '.join(f'{name} {part:.1f} s' for part, name in parts)})" if parts else ""


class SlowData(Entry):
    """Tells, once, that the steps wait for data; ``say`` logs a line."""

    def __init__(self, parts: FitParts, say: Callable[[str], None]) -> None:
        self._parts = parts
        self._state = parts.state
        self._spent = parts.time_spent
        self._say = say
        self._first = self._state.global_step
        self._look: float = FIRST_LOOK

    def next(self) -> Position:
        """Returns the step of the next look."""
        return Position(steps=self._first + self._look)

    def act(self, *, last: bool) -> PassEnd | None:
        """Looks how the time has divided so far."""
        if self._state.global_step < self._first + self._look:
            return None
        self._look *= 10
        waited = self._spent.waited
        training = self._spent.training
        if waited < _LEAST_SECONDS or waited < _SLOW * training:
            return None
        self._look = float("inf")
        meanwhile = " (the GPU may have work meanwhile)" if self._parts.strategy.device.type == "cuda" else ""
        cure = what_helps(self._parts.loader, at_epochs=self._spent.waits_at_epochs)
        share = f"{100 * waited / training:.0f} % of the time waits for data{meanwhile}"
        self._say(f"{share}: {cure}; more: fabricamp help slow-data")
        return None


def what_helps(loader: Loader, *, at_epochs: bool) -> str:
    """Returns what to give the train ``loader`` so that its batches are there in time; ``at_epochs``: epochs begin slowly."""
    leaves = [leaf for leaf in leaves_of(loader) if isinstance(leaf, DataLoader)]
    if not leaves:
        return "let a DataLoader with num_workers read ahead"
    leaf = min(leaves, key=lambda one: (type(one.dataset) is TensorDataset, one.num_workers))  # probably the slow one
    machine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = machine // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if leaf.num_workers and at_epochs and not leaf.persistent_workers:
        return "persistent_workers=True keeps the train loader's workers over the epochs"
    if type(leaf.dataset) is TensorDataset:
        return "give ResidentLoader(*tensors, batch_size=...) of fabricamp.data, which gathers whole batches, for the train loader"
    if leaf.num_workers < min(cores, 4):
        shares = ", each of which reads its part of the stream" if isinstance(leaf.dataset, IterableDataset) else ""
        return f"give the train loader num_workers={min(cores, 4)} (now {leaf.num_workers}){shares}"
    if leaf.num_workers:
        return (
            f"{leaf.num_workers} workers of the train loader are too slow: less work a sample, or a higher num_workers or "
            "prefetch_factor"
        )
    return "this machine has no core for workers: less work a sample, or decode once in prepare_data"
