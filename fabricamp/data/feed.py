"""Reads batches from the loader, prefetches them, and gives them to the step; keeps the position that a checkpoint stores.

In the order of the file: what a run asks of a :class:`Feed`, one pass from its opening to its end, and the resume point.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import torch

from fabricamp.data.combined import CombinedLoader, CombinedPass, exact_length, most_batches
from fabricamp.data.lengths import ends_by_samples, known_length
from fabricamp.data.position import (
    BEGUN,
    StreamPass,
    as_saved,
    batches_before,
    begin_stream,
    continues_after_limit,
    convert,
    draw_order,
    draws_of,
    draws_while_reading,
    end_pass,
    enter,
    generators_of,
    is_drawn_again,
    is_read_past,
    is_stateful,
    isolate,
    own_sampler,
    position_of,
    restore,
    restore_states,
    states_of,
    why_read_past,
    without_first,
)
from fabricamp.data.transfer import Staging
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.rng import capture_rng, snapshot_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    from fabricamp._utils.types import Batch, Loader, StateDict

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
    ``reach``: how many batches, with the one that was handed out last, a resume point may have to give again: those of an
    accumulation.  0: the pass is never resumed (an evaluation), and no loader is asked for its position.
    ``go_on`` makes ranks whose loaders end apart end together: each calls it with whether it has another batch, from the ``sure``
    number of batches on, which each has to have; if it returns False, no further batch is handed out.

    >>> feed = Feed([1, 2, 3], limit=2)
    >>> [(batch, feed.last) for batch in feed]
    [(1, False), (2, True)]
    """

    def __init__(
        self,
        loader: Loader,
        *,
        limit: float = math.inf,
        prepare: Callable[[Batch], Batch] | None = None,
        finish: Callable[[Batch], Batch] | None = None,
        device: torch.device | None = None,
        prefetch: int = 0,
        hooked: bool = False,
        begun: bool = False,
        reach: int = 1,
        sure: float = math.inf,
        go_on: Callable[[bool], bool] | None = None,
    ) -> None:
        self.last = False
        # A pass that ends by its samples is not cut at the most batches that they can make.
        self.limit = math.inf if ends_by_samples(loader) and limit >= most_batches(loader) else limit
        self._sure = sure
        self._go_on = go_on
        self._loader = loader
        self._combined = loader if isinstance(loader, CombinedLoader) else None
        self._members: list[Loader] = [loader] if self._combined is None else self._combined.members
        self._prepare = prepare
        self._finish = finish
        self._device = device or torch.device("cpu")
        self._prefetch = prefetch
        self._hooked = hooked
        self._reach = reach

        # What the loader needs for an exact resume.
        self._continues = reach > 0 and any(map(continues_after_limit, self._members))
        # Whether reading a batch may consume random numbers of this process.
        self._draws = (hooked and prefetch > 0) or any(map(draws_while_reading, self._members))
        self.counts_alone = not self._draws and self._combined is None
        """Whether the number of finished batches determines the position of a pass, however many batches are prefetched."""
        self.hooks_between = finish is not None or (hooked and not prefetch)
        """Whether hooks of the user run on a batch between the previous step and its own."""

        # The pass.
        self._running: Generator[Batch, None, None] | None = None
        self._source: Iterator[Batch] | None = None  # the loader's iterator
        self._entered: list[StateDict] = []  # each loader's position at which the pass began
        self._skipped = 0  # number of batches before that position
        # RNG states before the loader was opened: a resumed pass opens it, and reads past batches, from these.
        self._at_opening: StateDict = {}
        # Positions before the first batch of a pass that began in this process; set when that batch is read.
        self._first_positions: list[StateDict] = []
        # What leads to the first batch that the pass read in this process, where snapshots are recorded.
        self._first_snapshot: StateDict = {}
        # Snapshots before the batches that a resume point may have to give again and before those read ahead, unless a count is
        # enough; each with the number of batches before it.
        self._snapshots: deque[tuple[int, StateDict]] = deque()
        # Batches read ahead, and the exception that ended the reading, which is raised where its batch would come.
        self._queue: deque[Batch] = deque()
        self._failure: Exception | None = None
        # Number of batches handed out; without reading ahead only set with the last batch, as counting costs time.
        self._handed_out: float = math.inf
        self._ends_with_loader = False  # not at a limit
        # Snapshots before the last batch of a pass over loaders that keep their own positions, and before what was read after it:
        # the next pass continues there.  (_loaded has the resumed run's.)
        self._ending: list[StateDict] = []

        # Resuming.
        self._has_begun = begun  # a pass, in this or in an earlier process
        self._loaded: StateDict | None = None  # the loaded resume point, until a pass opens the loader
        self._resume: StateDict | None = None  # where the next pass begins, if not at the beginning
        self._resumed_at_end = False  # the resume point is after the last batch of a pass

    def __iter__(self) -> Iterator[Batch]:
        return self.starting_at(0)

    def starting_at(self, count: int) -> Iterator[Batch]:
        """Returns a pass without its first ``count`` batches, which are skipped unread if fabricamp draws the order, else read."""
        self.close()
        self.last = False
        # Cleared here, not in _open: the loader is opened at the first batch, and a checkpoint may be written before that.
        self._first_positions = []
        self._snapshots = deque()
        if self._resumed_at_end:
            self._resumed_at_end = False
            return iter(())
        if self._resume is None and count:
            self._resume = {"batches": count}
        self._skipped = count
        self._running = self._run()
        return self._running

    def watch(self, reading: Callable[[], AbstractContextManager[Any]]) -> None:
        """Makes later passes read each batch within a context of ``reading``."""
        starting_at = self.starting_at

        def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
            while True:
                with reading():
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch

        self.starting_at = lambda count: watched(starting_at(count))  # type: ignore[method-assign]  # of this instance

    def finish(self) -> None:
        """Exhausts the loader after the last batch, if its sampler consumes random numbers there, as a full loop would."""
        sampler = own_sampler(self._loader)
        if self._source is None or sampler is None or not sampler.order.reads_to_end:
            return
        if self.last and exact_length(self._loader) <= self.limit:
            next(self._source, None)

    def is_over(self, batches: int) -> bool:
        """Whether ``batches`` is the number of all batches of the pass; False while the last batch is out but not done."""
        return batches > 0 and self.last and batches >= self._handed_out

    def close(self) -> None:
        """Ends the pass and releases the loader's iterator and workers (persistent workers wait for the next pass)."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def length(self) -> int | float:
        """The number of batches in a full pass; inf if the loader has no exact length."""
        whole = exact_length(self._loader)
        return min(whole, self.limit) if whole < math.inf else whole

    @property
    def read_past(self) -> list[str]:
        """The type names of loaders that a resumed pass has to read from the beginning, with the reason if they have a state."""
        return [why_read_past(member) for member in self._members if is_read_past(member)]

    # -- one pass ----------------------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[Batch, None, None]:
        announced = exact_length(self._loader)
        total = min(announced, self.limit) - self._skipped
        if total <= 0:
            self._resume = None
            return
        counted = announced < math.inf
        try:
            if self._prefetch:
                yield from self._prefetched(total, counted=counted)
            elif not counted:
                yield from self._one_ahead(total)
            else:
                # Nothing is read ahead.  map and islice hand out batches without another Python generator.
                batches = self._open(total, counted=True, ahead=0)
                for function in (self._prepare, self._finish):
                    batches = batches if function is None else map(function, batches)
                yield from itertools.islice(batches, int(total) - 1)
                batch = next(batches)
                self.last = True
                self._handed_out = self._skipped + total
                yield batch
        finally:
            self.last = False
            self._end()

    def _prefetched(self, total: float, *, counted: bool) -> Iterator[Batch]:
        """Yields batches that were prepared ahead of their steps."""
        staging = Staging(self._device, self._prepare, hooked=self._hooked)
        batches = self._open(total, counted=counted, ahead=self._prefetch, prepare=staging.put)
        for number, (staged, last) in enumerate(self._read_ahead(batches, self._prefetch), self._skipped + 1):
            ready = staging.take(cast("list[Any]", staged))  # what put() has returned
            batch = ready if self._finish is None else self._finish(ready)
            del ready
            self.last = last
            self._handed_out = number
            yield batch

    def _one_ahead(self, total: float) -> Iterator[Batch]:
        """Yields batches of a loader without an exact length: the next batch is read, unprepared, to know which is the last."""
        batches = self._open(total, counted=False, ahead=1)
        for number, (raw, last) in enumerate(self._read_ahead(batches, 1), self._skipped + 1):
            batch = raw
            for function in (self._prepare, self._finish):
                batch = batch if function is None else function(batch)
            self.last = last
            self._handed_out = number
            yield batch

    def _open(
        self, total: float, *, counted: bool, ahead: int, prepare: Callable[[Batch], Batch] | None = None
    ) -> Iterator[Batch]:
        """Opens the loader and returns its batches, prepared by ``prepare``.

        A resumed pass leaves every generator as it is: an uninterrupted run consumed the RNG draws of opening, skipped and
        prefetched batches before, so a resumed run must not consume them again.
        """
        resume = self._resume or {}
        ended = (self._loaded or {}).get("at_limit")
        # The batches that were out but not done, and those that the run had read ahead, are read again, each from the RNG states of
        # that time.
        to_repeat = (resume.get("rng_states") or {}, *resume.get("rng_states_ahead", ()))
        # A loader that keeps its own position already counts the batches that are out, and a CombinedLoader knows only where its
        # last batch began.
        records = self._continues or (not self.counts_alone and ahead > 0)
        records = self._reach > 0 and (records or (self._combined is not None and self._reach > 1))
        within_pass = _is_within(resume)
        if within_pass:
            kept = (BEGUN, "positions", "orders", "at_limit")
            self._first_snapshot = {key: resume[key] for key in kept if key in resume}
        elif records:
            self._first_snapshot = {BEGUN: True, "orders": self._orders(), **self._next_pass()}
        self._resume = None
        self._loaded = None
        self._ending = []
        self._queue = deque()
        earlier = resume.get("earlier", ()) if records else ()
        numbered = [(number - len(earlier) + self._skipped, snapshot) for number, snapshot in enumerate(earlier)]
        self._snapshots = deque(numbered, max(self._reach + ahead, len(earlier) + len(to_repeat)))
        self._failure = None
        self._ends_with_loader = total == math.inf
        generators = generators_of(self._members)
        if ended and self._continues and len(ended["positions"]) == len(self._members):
            self._end_again(ended, generators)

        if not within_pass:
            rng = capture_rng() if records or any(map(is_drawn_again, self._members)) else None
            self._at_opening = {"rng": rng, "generators": states_of(generators), "earlier_pass": self._has_begun}
            self._source = self._enter(resume)
            return self._checked(total, counted=counted, records=records, prepare=prepare)

        self._at_opening = resume.get("at_pass_start", {})
        # As in that run, so that the skipped batches consume the same random numbers.
        self._has_begun = self._at_opening.get("earlier_pass", self._has_begun)
        with isolate(generators):
            restore(self._at_opening, generators)
            self._source = self._enter(resume)
            draw_order(self._loader)
            batches = self._checked(total, counted=counted, records=records, prepare=prepare)
            if ahead:
                for drawn in to_repeat:
                    restore(drawn, generators)
                    self._read(batches)
            elif "rng_states" in resume or not resume.get("batches"):  # reading the first batch draws the order
                read: list[Batch] = []
                for drawn in to_repeat:
                    restore(drawn, generators)
                    read += itertools.islice(batches, 1)
                return itertools.chain(read, batches)
            return batches

    def _end_again(self, ended: StateDict, generators: list[torch.Generator]) -> None:
        """Repeats the end of a pass of the resumed run, so that the next pass can continue after it."""
        with isolate(generators):
            if self._combined is None:
                self._source = self._enter(ended)
            else:
                self._source = self._combined.stopped(ended["positions"])
            for drawn in (ended["rng_states"], *ended.get("rng_states_ahead", ())):
                restore(drawn, generators)
                next(self._source, None)
            self._end()

    def _enter(self, resume: StateDict) -> Iterator[Batch]:
        """Begins a pass at the positions of ``resume``, or after its number of ``batches``."""
        batches = resume.get("batches", 0)
        self._entered = resume.get("positions") or [{"batches": batches} for _ in self._members]
        again = self._has_begun
        self._has_begun = True
        if self._combined is None:
            unread = enter(self._loader, self._entered[0]) if resume else 0
            position = {} if unread else self._entered[0]
            return without_first(begin_stream(self._loader, position, again=again), unread)
        self._combined.again = again
        if resume.get("positions"):
            return self._combined.starting_at(self._entered)
        return without_first(self._combined.batches(), batches)

    def _checked(
        self, total: float, *, counted: bool, records: bool, prepare: Callable[[Batch], Batch] | None
    ) -> Iterator[Batch]:
        """Returns at most ``total`` batches; raises if fewer come than ``len()`` announced, or if the iterator is used up.

        ``records``: takes a snapshot before each batch is read.
        """
        assert self._source is not None
        # Asks for each batch by next() alone: iter() of a user's own iterator may start anew.
        opened: Iterator[Batch] = map(next, itertools.repeat(self._source))
        source = opened
        if total < math.inf:
            source = itertools.islice(opened, int(total))
            if self._continues:
                before_last = int(total) - 1
                source = itertools.chain(
                    itertools.islice(opened, before_last), self._last_of_limit(opened, before_last)
                )
        # A resumed pass may have to be begun again too, for an accumulation that began with it.
        begins = self._skipped == 0 or self._combined is None
        if begins and not self._continues and not any(map(is_stateful, self._members)):
            source = itertools.chain(self._first_of(source), source)
        # zip counts the batches without a Python function per batch, and records before it reads.
        counter = itertools.count()
        recorded: Iterator[None] = map(self._record, itertools.count()) if records else itertools.repeat(None)
        batches = map(operator.itemgetter(1), zip(recorded, source, counter, strict=False))
        if prepare is not None:
            batches = map(prepare, batches)
        return itertools.chain(batches, self._check_count(counter, total if counted else 0))

    def _first_of(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the first batch that is read; records the position before the pass's first, with the draws of its order."""
        for batch in itertools.islice(source, 1):  # reading the first batch draws the order
            if self._combined is None:
                position = position_of(self._loader, self._entered[0], 0)
                nothing_done = dict.fromkeys(position.keys() - {"draws"}, 0)
                self._first_positions = [{**position, **nothing_done, BEGUN: True}]
            else:
                self._first_positions = self._positions(0)
            yield batch

    def _last_of_limit(self, opened: Iterator[Batch], read: int) -> Iterator[Batch]:
        """Yields the last batch of a pass that a limit ends; nothing if the loader is already exhausted."""
        self._ending = [self._snapshot(read)]
        batch = next(opened, _END)
        if batch is not _END:
            yield batch
        elif self._combined is None:
            self._ending = []
            self._ends_with_loader = True

    def _check_count(self, counter: Iterator[int], announced: float) -> Iterator[Batch]:
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

    def _read_ahead(self, batches: Iterator[Batch], ahead: int) -> Iterator[tuple[Batch, bool]]:
        """Yields (batch, whether it is the last), reading ``ahead`` batches ahead; raises an error in place of its batch."""
        queue = self._queue
        handed_out = self._skipped
        if not queue:  # a resumed pass has read batches in _open
            self._read(batches)
        while True:
            while queue[-1] is not _END and len(queue) <= ahead:
                self._read(batches)
            batch = queue.popleft()
            if batch is _END:
                break
            last = queue[0] is _END and self._failure is None
            handed_out += 1
            if self._go_on is not None and handed_out >= self._sure and not self._go_on(not last):
                self._end_with_others(ends_here=last)
                last = True
            yield batch, last
            del batch
            if last:
                return
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def _read(self, batches: Iterator[Batch]) -> None:
        """Reads one batch into the queue, or notes the end or the error that came in its place."""
        try:
            batch = next(batches, _END)
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            batch = _END
            self._failure = error
        if batch is _END and self._failure is None and self._ends_with_loader and self._continues:
            self._note_ending()
        self._queue.append(batch)

    def _note_ending(self) -> None:
        """Keeps where the next pass continues, after the end of loaders that keep their own positions."""
        recorded = [snapshot for _, snapshot in self._snapshots][-2:]
        if self._combined is not None:
            # A pass over several loaders may end within some of their streams.  Without a batch, nothing was read that the next
            # pass could continue.
            self._ending = [] if BEGUN in recorded[-1] else recorded[-1:]
            self._ends_with_loader = False
        elif len(recorded) == 2 and BEGUN not in recorded[0]:
            # The last batch is read again too: from the state after it, one stream ends and another begins its next pass.
            self._ending = recorded
            self._ends_with_loader = False

    def _end_with_others(self, *, ends_here: bool) -> None:
        """Notes that another rank has no further batch, so that this pass ends before a batch that was read."""
        self._failure = None
        if self._continues and not ends_here:
            self._ending = [self._snapshots[-1][1]]
            self._ends_with_loader = False

    def _end(self) -> None:
        """Drops the prefetched batches but keeps their snapshots; releases the loader's iterator and ends its workers."""
        self._queue = deque()
        if isinstance(self._source, CombinedPass):
            self._source.close()
        else:
            end_pass(self._loader, self._source)
            self._source = None

    # -- the resume point --------------------------------------------------------------------------------------------------------

    def state_dict(self, batches: int, *, within: bool = False) -> StateDict:
        """Returns the resume point after ``batches`` batches of the pass, on this rank.

        0 batches: the resume point is between two passes; with ``within``, it is in the pass whose order is drawn and whose first
        batch is out.
        """
        loaded = self._loaded
        if loaded is not None and (batches or (loaded["batches"] == 0 and _is_within(loaded))):
            return loaded
        state: StateDict = {
            "batches": batches,
            "generators": states_of(generators_of(self._members)),
            "orders": self._orders(),
            "earlier_pass": self._has_begun,
        }
        if within and batches == 0 and self._first_positions:
            return {**state, "positions": self._first_positions, "at_pass_start": self._at_opening, "is_over": False}
        # Of the batches that are out but not done, with which a resumed run begins, and of those read ahead.
        snapshots = [snapshot for number, snapshot in self._snapshots if number >= batches]
        if batches == 0 and not (within and snapshots):
            return {**state, **self._next_pass(), "is_over": False}
        if self.is_over(batches):
            return {**state, **self._next_pass(), "is_over": True}
        if batches >= self._handed_out:
            state = {**self._at_limit(), **state}
        if snapshots and len(snapshots) < self._snapshots[-1][0] + 1 - batches:
            raise CheckpointError(
                f"the position in the data before batch {batches} is not known any more; write checkpoints between two batches"
            )
        saved = [as_saved(snapshot) for snapshot in snapshots]
        first = saved[0] if saved else {"positions": self._positions(batches - self._skipped)}
        return {
            **state,
            **first,
            "rng_states_ahead": [snapshot["rng_states"] for snapshot in saved[1:]],
            # Where a resumed run may have to begin in turn, if it is cut within the accumulation that is in progress here.
            "earlier": [as_saved(snapshot) for number, snapshot in self._snapshots if number < batches][
                1 - self._reach :
            ],
            "at_pass_start": self._at_opening,
            "is_over": False,
        }

    def _next_pass(self) -> StateDict:
        """Returns where the next pass begins: positions, empty for the beginning, and ``at_limit``, the end of the last pass."""
        if self._resume is not None:
            positions = self._resume["positions"]
        elif self._ends_with_loader:
            # The state of an exhausted stream may also say how its next pass begins.
            positions = [position_of(member, {}, 0) for member in self._members]
        else:
            positions = []
        return {"positions": positions, **self._at_limit()}

    def _at_limit(self) -> StateDict:
        """Returns ``at_limit``, what to read again for the next pass to continue after the last one; empty for the first pass."""
        if self._ending:
            first, *after = map(as_saved, self._ending)
            return {"at_limit": {**first, "rng_states_ahead": [snapshot["rng_states"] for snapshot in after]}}
        if self._loaded is not None and self._loaded.get("at_limit"):
            return {"at_limit": self._loaded["at_limit"]}
        return {}

    def _orders(self) -> list[StateDict | None]:
        samplers = map(own_sampler, self._members)
        return [None if sampler is None else sampler.order.state_dict() for sampler in samplers]

    def _record(self, read: int) -> None:
        """Keeps the snapshot before a batch, after ``read`` batches of this pass."""
        if read:
            snapshot = self._snapshot(read)
        else:
            # The loader is not asked: it may not know its position before its first batch.
            snapshot = {"positions": self._entered, **self._first_snapshot, "rng_states": self._drawn()}
        self._snapshots.append((self._skipped + read, snapshot))

    def _snapshot(self, read: int) -> StateDict:
        """Returns the positions after ``read`` batches with the generators' states, from which the next one is read again."""
        return {"positions": self._positions(read), "rng_states": self._drawn()}

    def _drawn(self) -> StateDict:
        """Returns the generators' states, those of the global ones only if reading may consume their numbers."""
        return {"rng": snapshot_rng() if self._draws else None, "generators": states_of(generators_of(self._members))}

    def _positions(self, read: int) -> list[StateDict]:
        if self._combined is None:
            position = position_of(self._loader, self._entered[0], read)
            if isinstance(self._source, StreamPass) and self._continues:
                position["stream_samples"] = self._source.samples
            return [position]
        return self._source.positions(read) if isinstance(self._source, CombinedPass) else self._entered

    def load_state_dict(self, state: StateDict) -> int:
        """Makes the next pass begin at ``state``; returns the number of batches before it, in this run's batch size."""
        restore_states(generators_of(self._members), state["generators"])
        positions = state["positions"]
        batches = int(state["batches"])
        if positions and len(positions) != len(self._members):
            raise CheckpointError(
                f"the checkpoint was written in an epoch over {len(positions)} loaders, and this run has {len(self._members)}; "
                "give the same ones, or a checkpoint from the end of an epoch"
            )
        self.last = bool(state["is_over"])
        self._resumed_at_end = self.last
        self._loaded = state
        self._has_begun = bool(state.get("earlier_pass", True))
        self._choose_orders(state["orders"], positions)
        if self.last:
            self._resume = {"batches": 0, "positions": positions} if positions else None
            self._ends_with_loader = bool(positions)
            whole = exact_length(self._loader)
            self._handed_out = batches if whole == math.inf else int(min(whole, self.limit))
            return self._handed_out
        self._resume = state if positions or state.get(BEGUN) else None
        if not batches:
            return 0
        if self._combined is not None:
            return self._combined.batches_before(positions)
        return batches_before(self._loader, positions[0])

    def _choose_orders(self, orders: list[StateDict | None], positions: list[StateDict]) -> None:
        """Continues with the sample orders of the resumed run."""
        for member, order, position in itertools.zip_longest(self._members, orders, positions):
            sampler = own_sampler(member)
            if position is not None:
                convert(member, order, position)
            if sampler is not None and order is not None:
                sampler.resume(order, draws_of(position or {}))


def _is_within(state: StateDict) -> bool:
    """Whether a resume point is within a pass: after some of its batches, or within its first one."""
    begun = state.get(BEGUN) or any(position.get(BEGUN) for position in state.get("positions", ()))
    return bool(state.get("batches") or begun)
