"""The way of batches from the loader into the step."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp.data.combined import CombinedLoader
from fabricamp.data.lengths import known_length
from fabricamp.data.loaders import skip_batches
from fabricamp.data.transfer import record_stream
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

__all__ = ["Feed"]

_END = object()


class Feed:
    """Prepared batches of one pass over ``loader``, at most ``limit``; ``last`` is True while the last one is out.

    ``prepare`` is what happens to a batch on its way (moving it to the device); ``finish`` is what has to see the state
    that the previous step left (the user's ``on_after_batch_transfer``).  With ``prefetch`` on a CUDA ``device``,
    ``prepare`` runs one batch ahead on a stream of its own, and ``finish`` when the batch is handed over, on the stream
    of the step.

    One batch is read ahead only with ``prefetch``, or where the loader does not say exactly how many it gives.

    >>> feed = Feed([1, 2, 3], limit=2)
    >>> [(batch, feed.last) for batch in feed]
    [(1, False), (2, True)]
    """

    def __init__(
        self,
        loader: Any,
        *,
        limit: float = math.inf,
        prepare: Callable[[Any], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        device: torch.device | None = None,
        prefetch: bool = False,
    ) -> None:
        self.last = False
        self._loader = loader
        self.limit = limit
        self._prepare = prepare
        self._finish = finish
        self._device = device or torch.device("cpu")
        self._prefetch = prefetch and self._device.type == "cuda"
        self._running: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.behind(0)

    def behind(self, count: int) -> Iterator[Any]:
        """A pass without its first ``count`` batches: never read where the order is ours, else read past."""
        self.close()
        self._running = self._run(count)
        return self._running

    def close(self) -> None:
        """Ends the pass: lets go of the loader's iterator and its workers (persistent ones wait for the next pass)."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _run(self, skipped: int) -> Generator[Any, None, None]:
        announced = _exact_length(self._loader)
        total = min(announced, self.limit) - skipped
        if total <= 0:
            return
        unread = skip_batches(self._loader, skipped) if skipped else 0
        batches = _taken(self._loader, total, exactly=announced < math.inf, unread=unread)
        try:
            if self._prefetch:
                yield from self._prefetched(batches)
            elif announced < math.inf:
                yield from self._counted(batches, int(total))
            else:
                yield from self._looked_ahead(batches)
        finally:
            self.last = False
            batches.close()

    def _counted(self, batches: Iterator[Any], total: int) -> Iterator[Any]:
        """Batches whose number is known: nothing is read ahead."""
        prepared = batches
        for function in (self._prepare, self._finish):
            prepared = prepared if function is None else map(function, prepared)
        yield from itertools.islice(prepared, total - 1)
        batch = next(prepared)
        self.last = True
        yield batch

    def _looked_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches whose number is not known: the next one is read, but not prepared, before one is handed over."""
        for raw, last in _look_ahead(batches):
            batch = raw
            for function in (self._prepare, self._finish):
                batch = batch if function is None else function(batch)
            self.last = last
            yield batch

    def _prefetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches prepared one ahead on a side stream; the stream of the step waits for it, the host never."""
        side = torch.cuda.Stream(self._device)
        # What `prepare` reads (a module's buffers) was written on the stream of the step, before its first batch.
        side.wait_stream(torch.cuda.current_stream(self._device))

        def stage(batch: Any) -> tuple[Any, torch.cuda.Event]:
            with torch.cuda.stream(side):
                ready = batch if self._prepare is None else self._prepare(batch)
                return ready, side.record_event()

        for (ready, copied), last in _look_ahead(map(stage, batches)):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            record_stream(ready, stream)
            batch = ready if self._finish is None else self._finish(ready)
            self.last = last
            yield batch


def _taken(loader: Any, total: float, *, exactly: bool, unread: int = 0) -> Generator[Any, None, None]:
    """At most ``total`` batches behind ``unread``; raises where fewer come than were announced, or an iterator is used up."""
    source = iter(loader)
    count = 0
    try:
        next(itertools.islice(source, unread, unread), None)
        for count, batch in enumerate(source if total == math.inf else itertools.islice(source, int(total)), 1):  # noqa: B007
            yield batch
    finally:
        _end_workers(loader, source)
    if exactly and count < total:
        raise ConfigError(
            f"{type(loader).__name__} announced {known_length(loader)} batches by its len() but ended after {count}; "
            "make its __len__ exact, or leave it out"
        )
    if count == 0 and source is loader:
        raise ConfigError(
            f"the loader is a {type(loader).__name__} that is used up: it can be iterated only once; "
            "pass a DataLoader, a list or another object that every epoch can iterate anew"
        )


def _end_workers(loader: Any, source: Any) -> None:
    """Ends the workers of one pass now: left to the collector, a traceback that is kept would keep them too."""
    shut_down = getattr(source, "_shutdown_workers", None)
    if shut_down is not None and not loader.persistent_workers:
        shut_down()


def _look_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last; an error in reading ahead is raised at the batch that it belongs to."""
    batch = next(batches, _END)
    while batch is not _END:
        failure: Exception | None = None
        following: Any = _END
        try:
            following = next(batches, _END)
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        yield batch, following is _END and failure is None
        if failure is not None:
            raise failure
        batch = following


def _exact_length(loader: Any) -> int | float:
    """The number of batches where it can be relied on, else inf: an IterableDataset's len is an estimate."""
    members = loader.members if isinstance(loader, CombinedLoader) else [loader]
    if any(isinstance(member, DataLoader) and isinstance(member.dataset, IterableDataset) for member in members):
        return math.inf
    return known_length(loader)
