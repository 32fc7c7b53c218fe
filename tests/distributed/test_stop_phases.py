"""The phases of a stop: each cell of their table, who writes which fact, a signal between any two lines of what is called."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from fabricamp.state import NOT_VALIDATING, RunState
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import StopAgreement, Watchdog, signals, stop, watch
from fabricamp.watchdog.stop import Phase

LONG = 20.0
"""Seconds for what happens at once, on a slow machine."""


def rank_of(rank, world_size):
    strategy = Strategy()
    strategy.environment = Environment(rank=rank, world_size=world_size)
    return strategy


# -- the table ---------------------------------------------------------------------------------------------------------------------


def table():
    """Returns {(phase, event): phase, or "-" where the event cannot come} from the docstring."""
    lines = [line.split() for line in StopAgreement.phase.__doc__.splitlines()]
    begin, head, end = (index for index, words in enumerate(lines) if words and set("".join(words)) == {"="})
    ((_, *events),) = lines[begin + 1 : head]
    return {
        (phase, event): cell
        for phase, *cells in lines[head + 1 : end]
        for event, cell in zip(events, cells, strict=True)
    }


TABLE = table()
CELLS = [cell for cell, leads_to in TABLE.items() if leads_to != "-"]


class Three:
    """Three ranks over one store; what is asked of ``own`` is looked at, and rank 2 answers last."""

    def __init__(self):
        self.store = dist.HashStore()
        self.other, self.own, self.last = (StopAgreement(RunState(), rank_of(rank, 3)) for rank in range(3))

    def begin(self):
        self.own.begin()

    def request(self):
        self.own.request("SIGTERM")

    def found(self):
        self.other.begin()
        self.other.request("SIGUSR1")
        self.other.poll(self.store)
        self.own.poll(self.store)

    def agree(self):
        self.last.begin()
        self.early()

    def early(self):
        self.own.poll(self.store)  # its promise, if it has made none
        self.other.poll(self.store)
        self.last.poll(self.store)
        self.own.poll(self.store)


WAYS = {
    "OPENING": [()],
    "RUNNING": [("begin",)],
    "ASKED": [("begin", "request")],
    "PROMISED": [("begin", "found"), ("begin", "request", "found")],
    "AGREED": [("begin", "found", "agree")],
    "ABANDONED": [("request",), ("found",), ("begin", "found", "early"), ("request", "begin"), ("found", "begin")],
}


def test_the_table_has_every_phase_and_each_has_a_way():
    assert {phase for phase, _ in TABLE} == {one.name for one in Phase} == WAYS.keys()
    impossible = {cell for cell, leads_to in TABLE.items() if leads_to == "-"}
    without_promise = set(itertools.product(("OPENING", "RUNNING", "ASKED"), ("agree", "early")))
    assert impossible == without_promise | {("AGREED", "early"), ("ABANDONED", "agree")}


def test_the_page_tells_of_each_phase_and_of_each_writer_s_methods():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    told = page.split("### A stop by a signal")[1].split("\n## ")[0]
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert re.findall("^\\| `([A-Z]+)` ", "\n".join(rows), re.MULTILINE) == [*Phase.__members__]
    notes = ["request", "poll", "note_store_lost", "guard", "begin", "note_exception"]
    assert [name for name in notes if hasattr(StopAgreement, name) and f"`{name}`" in "".join(rows)] == notes


@pytest.mark.parametrize(("phase", "event"), CELLS, ids=map("-".join, CELLS))
def test_each_cell(phase, event):
    for way in WAYS[phase]:
        if event == "early" and "agree" in way:
            continue
        three = Three()
        for step in way:
            getattr(three, step)()
        assert three.own.phase.name == phase, way
        getattr(three, event)()
        assert three.own.phase.name == TABLE[phase, event], way
        assert three.own.abandoned == (three.own.phase is Phase.ABANDONED)
        assert three.own.answered == (three.own.phase in (Phase.PROMISED, Phase.AGREED, Phase.ABANDONED))


@pytest.mark.parametrize("phase", WAYS)
def test_the_loss_of_the_store_leads_nowhere(phase):
    for way in WAYS[phase]:
        three = Three()
        for step in way:
            getattr(three, step)()
        three.own.note_store_lost("connection reset")
        assert three.own.phase.name == phase, way
        assert three.own.settled


def test_a_single_rank_agrees_with_itself():
    for begun, phase in ((False, Phase.ABANDONED), (True, Phase.AGREED)):
        agreement = StopAgreement(RunState(), Strategy())
        if begun:
            agreement.begin()
        agreement.request("SIGTERM")
        assert (agreement.phase, agreement.reason, agreement.settled) == (phase, "SIGTERM", False)
        agreement.begin()
        agreement.request("SIGUSR1")
        assert (agreement.phase, agreement.reason) == (phase, "SIGTERM")


# -- the facts ---------------------------------------------------------------------------------------------------------------------


def noting(kind, written):
    """Returns a class of facts that notes each change: of whom, its name, whether it was unset before, and the thread."""

    class Noting(kind):
        def __init__(self):
            super().__init__()
            self.changes = True

        def __setattr__(self, name, value):
            if getattr(self, "changes", False) and getattr(self, name) != value:
                unset = getattr(self, name) == getattr(kind(), name)
                written.append((id(self), name, unset, threading.current_thread().name))
            object.__setattr__(self, name, value)

    return Noting


@pytest.mark.parametrize("early", [False, True])
def test_each_fact_is_set_once_by_its_own_thread(monkeypatch, early):
    """Rank 1 asks; with ``early`` rank 0 is before its first batch.  Rank 0's store is lost at the end."""
    written = {"_OfMainThread": [], "_OfWatchdog": []}
    for name, changes in written.items():
        monkeypatch.setattr(stop, name, noting(getattr(stop, name), changes))
    store = dist.HashStore()
    monkeypatch.setattr(watch, "_own_store", lambda _: store)
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 10 * LONG)  # no rank is ended by force
    both = [Watchdog(RunState(), rank_of(rank, 2)) for rank in range(2)]
    for watchdog in both:
        watchdog.agreement.guard()
        if not early or watchdog is both[1]:
            watchdog.agreement.begin()
        watchdog.start()
    both[1].agreement.request("SIGTERM")
    for watchdog in both:
        watchdog.agreement.wait_for_answers()
        watchdog.agreement.begin()  # again, as each evaluation does
        watchdog.agreement.request("SIGUSR1")
        if early:
            for interrupts in (watchdog.agreement.hold, watchdog.agreement.raise_once):
                with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
                    interrupts()
            watchdog.agreement.raise_once()  # only once
        else:
            watchdog.agreement.hold()
    for watchdog in both:
        watchdog.close()
    threads = {"_OfMainThread": threading.current_thread().name, "_OfWatchdog": "fabricamp-watchdog"}
    for name, changes in written.items():
        assert changes
        assert all(unset and thread == threads[name] for _, _, unset, thread in changes), changes
        facts = [change[:2] for change in changes]
        assert len(facts) == len(set(facts)), changes
    assert {name for _, name, *_ in written["_OfWatchdog"]} == {"reason", "learned_at", "promise", "promises"}


# -- a signal between any two lines ------------------------------------------------------------------------------------------------


class AtLine:
    """Calls ``action`` before the ``number``-th line of stop.py that is run within its calls, as a signal comes at any moment."""

    def __init__(self, number, action):
        self.number, self.action = number, action

    @property
    def called(self):
        return self.number <= 0

    def __call__(self, function, *args):
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            sys.settrace(before)

    def _trace(self, frame, event, _argument):
        if frame.f_code.co_filename != stop.__file__:
            return None
        if event == "line":
            self.number -= 1
            if self.number == 0:
                # Python 3.11 lets a thread that is traced wait at its next call until the main thread has handled a signal.
                sys.settrace(None)
                self.action()  # what it raises comes out of this line, as from a signal handler
        return self._trace


BATCHES = 6
"""Those of a validation; the rank that asks runs two of them per turn."""


class Rank:
    """The main thread and the watchdog's thread of a rank, by turns; ``ended`` is how and where the run ended here.

    A micro-batch has an exchange: it ends only when the other ranks are in it too.  The validation after the micro-batch
    ``validates_after`` has one at its end.
    """

    def __init__(self, rank, world_size, store, *, begins_at, validates_after, at_line):
        self.state = RunState()
        self.agreement = StopAgreement(self.state, rank_of(rank, world_size))
        self.store, self.others = store, []
        self.begins_at, self.validates_after = begins_at, validates_after
        self.per_turn = 1 if rank else 2
        self.at_line = at_line  # by the name of the method in which another signal comes
        self.guarded = self.begun = self.waits = False
        self.ended = None
        self.turns = 0
        self.phases = [Phase.OPENING]

    def call(self, name, *args):
        function = getattr(self.agreement, name)
        result = self.at_line[name](function, *args) if name in self.at_line else function(*args)
        self.look()
        return result

    def look(self):
        phase = self.agreement.phase
        if phase is not self.phases[-1]:
            self.phases.append(phase)

    def handle(self, name="SIGTERM"):
        """Runs the handler of a signal, which may raise."""
        agreement = self.agreement
        if "request" in self.at_line:
            agreement.request = partial(self.at_line["request"], agreement.request)
        try:
            signals._on_signal(agreement, name)(signal.Signals[name], None)
        finally:
            agreement.__dict__.pop("request", None)
            self.look()

    def interrupt(self, name="SIGTERM"):
        """Sends a signal to the main thread, wherever that is."""
        self.within_main(self.handle, name)

    def within_main(self, function, *args):
        if self.ended is not None:
            return
        try:
            function(*args)
        except KeyboardInterrupt:
            self.agreement.note_exception()
            self.ended = ("abandoned",)

    def watch(self):
        """Polls, as the watchdog's thread, which interrupts the main thread of an abandoned run."""
        self.call("poll", self.store)
        if self.agreement.abandoned:
            self.interrupt()

    def advance(self):
        self.within_main(self._advance)

    def _advance(self):
        self.turns += 1
        state = self.state
        if not self.guarded:
            self.guarded = True
            self.call("guard")
        elif not self.begun:
            if self.turns > self.begins_at:
                self.begun = True
                self.call("begin")
        elif self.waits:
            if self.agreement.settled or not self.others:
                self.waits = False
                if self.call("hold"):
                    self.ended = ("stopped", state.interruption, state.batches_done, state.evaluated)
        elif state.batches_done == self.validates_after:
            self._validate()
        elif all(one.is_in_batch(state.batches_done + 1) for one in self.others):
            state.batches_done += 1
            if state.batches_done != self.validates_after:  # the validation comes first
                self.waits = state.batches_done >= state.hold_at

    def _validate(self):
        state = self.state
        if state.evaluated == NOT_VALIDATING:
            state.evaluated = 0
        elif state.evaluated == BATCHES and all(one.has_validated for one in self.others):
            self.validates_after = sys.maxsize
            state.evaluated = NOT_VALIDATING
            self.waits = state.batches_done >= state.hold_at
        for _ in range(self.per_turn):
            if state.evaluated < BATCHES and not self.waits:
                state.evaluated += 1
                self.waits = state.evaluated >= state.hold_evaluated

    @property
    def has_validated(self):
        return self.validates_after == sys.maxsize or self.state.evaluated == BATCHES

    def is_in_batch(self, number):
        done = self.state.batches_done
        goes_on = self.begun and not self.waits and self.ended is None and done != self.validates_after
        return number <= done + goes_on


def take_turns(ranks, signal_at):
    """Runs the ranks by turns until all have ended; rank 0 gets a signal in turn ``signal_at``."""
    for turn in range(60):
        if turn == signal_at:
            ranks[0].interrupt()
        for one in ranks:
            if one.others:
                one.watch()
            one.advance()
        if all(one.ended is not None and (one.agreement.settled or not one.others) for one in ranks):
            break


ORDER = [*Phase]


def run(world_size, function, on, number, what, *, signal_at, begins_at, validates_after):
    """Runs the ranks, and lets ``what`` come before the ``number``-th line in ``function`` of rank ``on``.

    Checks that all ranks end, and all in the same way; returns how, or None if fewer lines were run.
    """
    store = dist.HashStore()

    def action():
        if what == "a step":
            for one in ranks:
                one.advance()
        elif what == "a signal there":
            ranks[on - 1].interrupt("SIGUSR1")
        elif function == "poll":  # in the watchdog's thread, while the main thread is elsewhere
            ranks[on].interrupt("SIGUSR1")
        else:
            ranks[on].handle("SIGUSR1")

    at_line = AtLine(number, action)
    options = {"validates_after": validates_after}
    ranks = [
        Rank(
            one,
            world_size,
            store,
            begins_at=begins_at[one],
            at_line={function: at_line} if one == on else {},
            **options,
        )
        for one in range(world_size)
    ]
    for one in ranks:
        one.others = [other for other in ranks if other is not one]
    take_turns(ranks, signal_at)
    if not at_line.called:
        return None
    (end, *_), *_ = ends = [one.ended or ("runs", one.state.batches_done) for one in ranks]
    print(
        on, number, signal_at, begins_at, validates_after, ends, [[phase.name for phase in one.phases] for one in ranks]
    )
    assert ends == [ends[0]] * world_size
    assert end != "runs"
    for one in ranks:
        assert one.agreement.abandoned == (end == "abandoned")
        assert one.agreement.reason == ranks[0].agreement.reason
        assert one.phases == sorted(one.phases, key=ORDER.index)
        assert {Phase.AGREED, Phase.ABANDONED} & {*one.phases} == {one.phases[-1]}
        assert end == "abandoned" or one.state.hold_at == one.state.hold_evaluated == sys.maxsize
    return end


def at_every_line(world_size, function, on, what, **options):
    """Returns how the runs ended, one for each line that is run."""
    each = (run(world_size, function, on, number, what, **options) for number in itertools.count(1))
    return [*itertools.takewhile(lambda end: end is not None, each)]


VALIDATES = (3, sys.maxsize)


BOTH = {"abandoned", "stopped"}
ENDS = {"guard": {"abandoned"}, "begin": {"abandoned"}, "request": BOTH, "poll": BOTH, "hold": {"stopped"}}
"""How the runs end with another signal in these methods."""


@pytest.mark.parametrize("function", ["guard", "begin", "request", "hold"])
def test_another_signal_before_any_line_on_one_rank(function):
    ends = []
    for signal_at, begins_at, validates_after in itertools.product((0, 3, 7, 12), (0, 4), VALIDATES):
        options = {"signal_at": signal_at, "begins_at": (begins_at,), "validates_after": validates_after}
        ends += at_every_line(1, function, 0, "a signal here", **options)
    assert {*ends} == ENDS[function]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        *itertools.product(("guard", "begin", "request", "poll", "hold"), ("a signal here", "a signal there")),
        ("poll", "a step"),  # of the main threads
    ],
)
def test_what_comes_before_any_line_on_two_ranks(function, what):
    ends = []
    for signal_at, *others in itertools.product((0, 3, 7, 12), (0, 1), ((0, 0), (0, 4), (4, 0)), VALIDATES):
        on, begins_at, validates_after = others
        options = {"signal_at": signal_at, "begins_at": begins_at, "validates_after": validates_after}
        ends += at_every_line(2, function, on, what, **options)
    # Where the other rank is asked right before this one begins, this one begins in time.
    assert {*ends} == (BOTH if (function, what) == ("begin", "a signal there") else ENDS[function])


def trains(watchdog, exchange, ends):
    """A main thread: micro-batches with an exchange until the stop."""
    state, agreement = watchdog._state, watchdog.agreement
    while not state.interrupted:
        exchange.wait(LONG)  # raises if another rank has stopped before
        state.batches_done += 1
        if state.batches_done == 4 and watchdog.asks is not None:
            watchdog.asks()
        if state.batches_done >= state.hold_at:
            agreement.hold()
    ends.append((state.batches_done, state.interruption))


def side_by_side(function, on, number, asks, *, there):
    """Runs two ranks of two threads each.  Returns whether the request came before the ``number``-th line; checks how all end.

    Lines are counted from the beginning, or from the request of rank ``asks`` on.
    """
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(watch, "_own_store", lambda _: store)
        patches.setattr(watch, "_POLL_SECONDS", 0.001)
        both = [Watchdog(RunState(), rank_of(rank, 2)) for rank in range(2)]
        agreements = [one.agreement for one in both]
        at_line = AtLine(number, partial(agreements[on - there].request, "SIGUSR1"))

        def arm():
            setattr(agreements[on], function, partial(at_line, getattr(agreements[on], function)))

        def ask():
            arm()
            agreements[asks].request("SIGTERM")

        for rank, one in enumerate(both):
            one.asks = ask if rank == asks else None
            one.agreement.begin()
        if asks is None:
            arm()
        ends = []
        exchange = threading.Barrier(2)
        threads = [threading.Thread(target=trains, args=(one, exchange, ends), daemon=True) for one in both]
        for one in (*both, *threads):
            one.start()
        for one in threads:
            one.join(2 * LONG)
        for one in both:
            one.close()
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert [one.phase for one in agreements] == [Phase.AGREED] * 2
    return at_line.called


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("on", [0, 1])
def test_a_request_before_any_line_while_four_threads_run(on, there):
    for number in range(1, 12):  # the lines of a poll that finds nothing
        assert side_by_side("poll", on, number, None, there=there)
    for function, asks in itertools.product(("poll", "hold"), (0, 1)):
        # A poll on its way at the request may leave few lines for the next ones.
        assert sum(side_by_side(function, on, number, asks, there=there) for number in range(1, 36)) > 10
