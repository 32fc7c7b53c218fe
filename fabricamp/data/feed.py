"""Reads batches from the loader, prepares them and hands them to the step."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.data.combined import CombinedLoader, CombinedPass, exact_length
from fabricamp.data.lengths import known_length
from fabricamp.data.position import (
    BEGUN,
    as_saved,
    batches_behind,
    begin,
    draws_of,
    draws_while_reading,
    end_workers,
    enter,
    generators_of,
    goes_on_behind_a_pass,
    is_read_past,
    is_stateful,
    isolate,
    own_sampler,
    place_of,
    restore,
    restore_states,
    states_of,
    without_first,
)
from fabricamp.data.transfer import Staging
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.rng import capture_rng, snapshot_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

_END = object()


class Feed:
    """Yields the prepared batches of one pass over ``loader``, at most ``limit``.

    ``last`` is True from the moment the last batch is handed out until the pass ends.

    ``prepare`` is called on each batch (it moves the batch to the device).  ``finish`` is called on each prepared batch and sees
    the state after the previous step (the user's ``on_after_batch_transfer``).  ``prepare`` runs ``prefetch`` batches ahead, for
    a CUDA ``device`` on a side stream.  ``finish`` runs when the batch is handed over, on the stream of the step.
    ``hooked``: ``prepare`` contains hooks of the user, which may consume random numbers.
    Without ``prefetch``, one batch is read ahead if the loader has no exact length.
    ``begun``: the run began a pass in an earlier process.

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
        prefetch: int = 0,
        hooked: bool = False,
        begun: bool = False,
    ) -> None:
        self.last = False
        self.limit = limit
        self._loader = loader
        self._members: list[Any] = loader.members if isinstance(loader, CombinedLoader) else [loader]
        self._prepare = prepare
        self._finish = finish
        self._device = device or torch.device("cpu")
        self._prefetch = prefetch
        self._hooked = hooked
        self._running: Generator[Any, None, None] | None = None
        self._resume: dict[str, Any] | None = None  # the resume point of the next pass, until that pass begins
        self._source: Any = None
        self._entered: list[dict[str, Any]] = []
        self._behind = self._given = 0
        self._begun: dict[str, Any] = {}
        # Positions before the first batch of a pass that began in this process; set when that batch is read.
        self._first_places: list[dict[str, Any]] = []
        # Prefetched batches, each with the position before it; then the exception that ended the reading.
        self._queue: deque[tuple[Any, dict[str, Any]]] = deque()
        self._failure: Exception | None = None
        self._again = begun
        self._whole: float = math.inf  # number of batches of the pass, known when the last one is handed out
        self._loaded: dict[str, Any] | None = None
        # Whether the resume point is after the last batch of a pass, and whether the pass ends with the loader, not at a limit.
        self._over = self._to_the_end = False
        self._out: dict[str, Any] = {}  # position before the batch in the step; empty if not recorded
        # A stream can continue in the next pass after a limit ended one: the position before the last batch is recorded, that of
        # this process in _ended, that of the checkpoint in _ended_before.
        self._notes_end = any(map(goes_on_behind_a_pass, self._members))
        self._leaves = self._notes_end and isinstance(loader, CombinedLoader)  # a pass may stop within some streams
        self._ended = self._ended_before = None  # type: dict[str, Any] | None
        self._draws = (hooked and prefetch > 0) or any(map(draws_while_reading, self._members))
        self._marks = self._draws or isinstance(loader, CombinedLoader)
        self.counts_alone = not self._marks
        """Whether the number of finished batches determines the position of a pass, however many batches are prefetched."""
        self.hooks_between = finish is not None or (hooked and not prefetch)
        """Whether hooks of the user run on a batch between the previous step and its own."""
        self._ends_by_drawing = False

    def __iter__(self) -> Iterator[Any]:
        return self.behind(0)

    def behind(self, count: int) -> Iterator[Any]:
        """Returns a pass without its first ``count`` batches, which are skipped unread if fabricamp draws the order, else read."""
        self.close()
        self.last = False
        # Cleared here, not in _begin: the loader is opened at the first batch, and a checkpoint may be written before that.
        self._first_places = []
        if self._over:  # resumed after the last batch
            self._over = False
            return iter(())
        self._resume = self._resume or ({"batches": count} if count else None)
        self._behind = count
        self._running = self._run()
        return self._running

    def watch(self, reading: Callable[[], AbstractContextManager[Any]]) -> None:
        """Makes later passes read each batch within a context of ``reading``."""
        behind = self.behind

        def watched(batches: Iterator[Any]) -> Iterator[Any]:
            while True:
                with reading():
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch

        self.behind = lambda count: watched(behind(count))  # type: ignore[method-assign]  # of this instance

    def finish(self) -> None:
        """Exhausts the loader after the last batch, if its sampler consumes random numbers there, as a full loop would."""
        if self._ends_by_drawing and self.last:
            next(self._source, None)

    def is_over(self, batches: int) -> bool:
        """Whether ``batches`` is the number of all batches of the pass; False while the last batch is out but not done."""
        return batches > 0 and self.last and batches >= self._whole

    def close(self) -> None:
        """Ends the pass and releases the loader's iterator and workers (persistent workers wait for the next pass)."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def length(self) -> int | float:
        """The number of batches in a full pass; inf if the loader has no exact length."""
        return min(whole, self.limit) if (whole := exact_length(self._loader)) < math.inf else whole

    @property
    def read_past(self) -> list[str]:
        """The type names of loaders that a resumed pass has to read from the beginning."""
        return [type(member).__name__ for member in self._members if is_read_past(member)]

    def state_dict(self, batches: int, *, within: bool = False) -> dict[str, Any]:
        """Returns the resume point after ``batches`` batches of the pass, on this rank.

        0 batches: the resume point is between two passes; with ``within``, it is in the pass whose order is drawn and whose first
        batch is out.
        """
        if self._loaded is not None and batches:
            return self._loaded
        state: dict[str, Any] = {"batches": batches, "generators": states_of(generators_of(self._members))}
        samplers = map(own_sampler, self._members)
        orders = [None if one is None else one.order.state_dict() for one in samplers]
        state |= {"orders": orders, "again": self._again}
        over = self.is_over(batches)
        if within and batches == 0 and self._first_places:
            return {**state, "places": self._first_places, "begun": self._begun, "last": False}
        ended = self._ended_before if self._ended is None else as_saved(self._ended)
        state |= {"ended": ended} if ended and (batches == 0 or batches >= self._whole) else {}
        if over or batches == 0:
            # The state of an exhausted stream may also say how its next pass begins.
            places = [place_of(member, {}, 0) for member in self._members] if self._to_the_end else []
            if self._resume is not None:
                places = self._resume["places"]
            return {**state, "places": places, "last": over}
        begun = [self._out] if batches < self._whole else []  # the batch in the step; a resumed run starts it again
        marks = [as_saved(mark) for mark in (*begun, *(mark for _, mark in self._queue)) if mark]
        ahead = marks[0] if marks else {"places": self._places(batches - self._behind)}
        drawn = [mark["drawn"] for mark in marks[1:]]
        return {**state, **ahead, "drawn_ahead": drawn, "begun": self._begun, "last": False}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Makes the next pass begin at ``state``; returns the number of batches before it, in this run's batch size."""
        restore_states(generators_of(self._members), state["generators"])
        places, batches = state["places"], int(state["batches"])
        if places and len(places) != len(self._members):
            raise CheckpointError(
                f"the checkpoint was written in an epoch over {len(places)} loaders, and this run has {len(self._members)}; "
                "give the same ones, or a checkpoint from the end of an epoch"
            )
        self.last = self._over = bool(state["last"])
        self._loaded, self._again = state, bool(state.get("again", True))
        self._ended_before = state.get("ended")
        self._choose_orders(state.get("orders"), places)
        if self.last:
            self._resume, self._to_the_end = {"batches": 0, "places": places} if places else None, bool(places)
            whole = exact_length(self._loader)
            self._whole = batches if whole == math.inf else int(min(whole, self.limit))
            return self._whole
        self._resume = state if places else None
        if batches and isinstance(self._loader, CombinedLoader):
            return self._loader.batches_behind(places)
        return batches_behind(self._loader, places[0]) if batches else 0

    def _choose_orders(self, orders: list[Any] | None, places: list[dict[str, Any]]) -> None:
        """Continues with the sample orders of the resumed run; ``orders`` is None for a checkpoint that does not store them."""
        for member, order, place in itertools.zip_longest(self._members, orders or (), places):
            sampler = own_sampler(member)
            if sampler is None:
                continue
            if orders is None:
                sampler.go_on_as_before()
            elif order is not None:
                sampler.go_on(order, draws_of(place or {}))

    def _run(self) -> Generator[Any, None, None]:
        announced = exact_length(self._loader)
        self._ends_by_drawing = announced <= self.limit and own_sampler(self._loader) is not None
        total = min(announced, self.limit) - self._behind
        if total <= 0:
            self._resume = None
            return
        counts = announced < math.inf
        try:
            if self._prefetch:
                yield from self._prefetched(total, exactly=counts)
                return
            batches = self._begin(total, exactly=counts, ahead=0 if counts else 1)
            if counts:  # nothing is read ahead: map and islice, without another Python generator per batch
                for function in (self._prepare, self._finish):
                    batches = batches if function is None else map(function, batches)
                yield from itertools.islice(batches, int(total) - 1)
                batch = next(batches)
                self.last, self._whole = True, self._behind + total
                yield batch
            else:
                yield from self._looked_ahead(batches)
        finally:
            self.last = False
            self._end()

    def _begin(
        self, total: float, *, exactly: bool, ahead: int, prepare: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Opens the loader and returns its batches, prepared by ``prepare``.

        A resumed pass leaves every generator as it is: an uninterrupted run consumed the RNG draws of opening, skipped and
        prefetched batches before, so a resumed run must not consume them again.
        """
        resume, self._resume, self._loaded = self._resume or {}, None, None
        self._queue, self._failure = deque(), None
        self._given, self._to_the_end = 0, total == math.inf
        generators = generators_of(self._members)
        ended, self._ended, self._ended_before = self._ended_before, None, None
        if ended and self._notes_end and len(ended["places"]) == len(self._members):
            self._end_again(ended, generators)
        if not resume.get("batches") and not any(place.get(BEGUN) for place in resume.get("places", ())):
            rng = capture_rng() if any(map(is_read_past, self._members)) else None
            self._begun = {"rng": rng, "generators": states_of(generators), "again": self._again}
            self._source = self._enter(resume)
            return self._taken(total, exactly=exactly, prepare=prepare)
        self._begun = resume.get("begun", {})
        # As in that run, so that the skipped batches consume the same random numbers.
        self._again = self._begun.get("again", self._again)
        with isolate(generators):
            restore(self._begun, generators)
            self._source = self._enter(resume)
            batches = self._taken(total, exactly=exactly, prepare=prepare)
            if not ahead and not resume.get("batches"):
                return itertools.chain(list(itertools.islice(batches, 1)), batches)  # reading a batch draws the order
            if not ahead:
                return batches
            for drawn in (resume.get("drawn") or {}, *resume.get("drawn_ahead", ())):
                restore(drawn, generators)
                self._read(batches)
            return batches

    def _end_again(self, ended: dict[str, Any], generators: list[torch.Generator]) -> None:
        """Repeats the end of a pass that a limit ended in the resumed run, so that the next pass can continue after it."""
        with isolate(generators):
            combined = isinstance(self._loader, CombinedLoader)
            self._source = self._loader.stopped(ended["places"]) if combined else self._enter(ended)
            restore(ended["drawn"], generators)
            next(iter(self._source), None)
            self._end()

    def _end(self) -> None:
        """Drops the prefetched batches but keeps their positions; releases the loader's iterator and ends its workers."""
        self._queue = deque((_END, mark) for _, mark in self._queue)
        if isinstance(self._source, CombinedPass):
            self._source.close()
        else:
            end_workers(self._loader, self._source)
            self._source = None

    def _enter(self, resume: dict[str, Any]) -> Any:
        """Begins a pass at the ``places`` of ``resume``, or after its number of ``batches``."""
        self._entered = resume.get("places") or [{"batches": resume.get("batches", 0)} for _ in self._members]
        again, self._again = self._again, True
        if isinstance(self._loader, CombinedLoader):
            self._loader.again = again
            if not resume.get("places"):
                return without_first(self._loader.batches(), resume.get("batches", 0))
            return self._loader.behind(self._entered)
        unread = enter(self._loader, self._entered[0]) if resume else 0
        return without_first(begin(self._loader, again=again), unread)

    def _places(self, given: int) -> list[dict[str, Any]]:
        if isinstance(self._loader, CombinedLoader):
            return list(self._source.places(given)) if self._source is not None else self._entered
        return [place_of(self._loader, self._entered[0], given)]

    def _mark(self, given: int) -> dict[str, Any]:
        """Returns the position after ``given`` batches with the generators' states; a resumed pass reads the next batch again."""
        drawn = {"rng": snapshot_rng() if self._draws else None, "generators": states_of(generators_of(self._members))}
        return {"places": self._places(given), "drawn": drawn}

    def _looked_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches of a loader without an exact length; reads the next batch, unprepared, before it yields one."""
        for number, (raw, last) in enumerate(self._look_ahead(batches, 1), self._behind + 1):
            batch = raw
            for function in (self._prepare, self._finish):
                batch = batch if function is None else function(batch)
            self.last, self._whole = last, number
            yield batch

    def _prefetched(self, total: float, *, exactly: bool) -> Iterator[Any]:
        """Yields batches that were prepared ahead of their steps."""
        staging = Staging(self._device, self._prepare, hooked=self._hooked)
        batches = self._begin(total, exactly=exactly, ahead=self._prefetch, prepare=staging.put)
        for number, (staged, last) in enumerate(self._look_ahead(batches, self._prefetch), self._behind + 1):
            ready = staging.take(staged)
            batch = ready if self._finish is None else self._finish(ready)
            del ready
            self.last, self._whole = last, number
            yield batch

    def _look_ahead(self, batches: Iterator[Any], ahead: int) -> Iterator[tuple[Any, bool]]:
        """Yields (batch, whether it is the last), reading ``ahead`` batches ahead; raises an error in place of its batch."""
        queue = self._queue
        if not queue:
            self._read(batches)
        while True:
            while queue[-1][0] is not _END and len(queue) <= ahead:
                self._read(batches)
            batch, self._out = queue.popleft()
            if batch is _END:
                break
            yield batch, queue[0][0] is _END and self._failure is None
            del batch
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _read(self, batches: Iterator[Any]) -> None:
        """Reads one batch into the queue, with the position before it if the count alone does not determine that."""
        self._given += bool(self._queue)
        mark = self._mark(self._given) if self._marks and self._queue else {}
        try:
            batch = next(batches, _END)
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            self._failure, batch = error, _END
        if batch is _END and self._to_the_end and self._leaves and self._failure is None:
            self._ended, self._to_the_end = mark, False
        self._queue.append((batch, mark))

    def _taken(self, total: float, *, exactly: bool, prepare: Callable[[Any], Any] | None) -> Iterator[Any]:
        """Returns at most ``total`` batches; raises if fewer come than ``len()`` announced, or if the iterator is used up."""
        counter = itertools.count()
        source = self._source if total == math.inf else itertools.islice(self._source, int(total))
        if total < math.inf and self._notes_end:
            source = itertools.chain(itertools.islice(self._source, int(total) - 1), self._last(int(total) - 1))
        if self._behind == 0 and not self._notes_end and not any(map(is_stateful, self._members)):
            source = itertools.chain(self._first_of(source), source)
        numbered = zip(source, counter, strict=False)
        batches = map(operator.itemgetter(0), numbered)
        return itertools.chain(
            batches if prepare is None else map(prepare, batches),
            self._nothing_but_checks(counter, total if exactly else 0),
        )

    def _first_of(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yields the first batch of a pass; records the position before it, with the RNG draws of the pass's order."""
        for batch in itertools.islice(source, 1):  # reading the first batch draws the order
            if isinstance(self._loader, CombinedLoader):
                self._first_places = list(self._source.places(0))
            else:
                self._first_places = [{**place_of(self._loader, self._entered[0], 0), BEGUN: True}]
            yield batch

    def _last(self, given: int) -> Iterator[Any]:
        """Yields the last batch of a pass that a limit ends; nothing if the loader is already exhausted."""
        self._ended = self._mark(given)
        if (batch := next(self._source, _END)) is not _END:
            yield batch
        elif not self._leaves:
            self._ended, self._to_the_end = None, True

    def _nothing_but_checks(self, counter: Iterator[int], announced: float) -> Iterator[Any]:
        """Yields no batch; checks after the last one how many there were."""
        count = next(counter)
        if count < announced:
            raise ConfigError(
                f"{type(self._loader).__name__} announced {known_length(self._loader)} batches by its len() but ended after "
                f"{count}; make its __len__ exact, or leave it out"
            )
        if count == 0 and self._source is self._loader:
            raise ConfigError(
                f"the loader is a {type(self._loader).__name__} that is used up: it can be iterated only once; "
                "pass a DataLoader, a list or another object that every epoch can iterate anew"
            )
        yield from ()
