"""Interrupts a run on every rank at the same position, whichever rank gets the signal: by promises, without a collective."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from fabricamp.errors import DistributedError
from fabricamp.state import INTERRUPTIONS, NOT_VALIDATING, RunState
from fabricamp.watchdog.signals import HeededSignals

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from fabricamp.strategies.base import Strategy

ANSWER_SECONDS = 10.0
"""A rank counts as gone if its watchdog thread answers no request for this long; that thread never waits for the main thread."""

_REQUEST = "request"

_Position = tuple[int, int]
"""(micro-batches done, batches done of the validation after them; ``NOT_VALIDATING`` once that validation is over)."""

_BEFORE_FIRST_BATCH: _Position = (-1, 0)
"""The promise of a rank before its first batch: there is nothing to save, and nobody needs to wait for that rank."""

_HERE: _Position = (0, 0)
"""A position that every rank has come to."""


class Phase(Enum):
    """How far a run's stop has come on this rank; :attr:`StopAgreement.phase` has the table of what leads from one to another."""

    OPENING = "before the first batch: there is nothing to save"
    RUNNING = "between the first batch and the end; nobody has asked to stop, as far as this rank knows"
    ASKED = "this rank asks, and the others do not know it yet"
    PROMISED = "some rank asks, and this rank has promised a position at which it waits for the others"
    AGREED = "all promises are known: all ranks stop at the largest"
    ABANDONED = "the request found a rank before its first batch: all ranks end at once"


class _Request(NamedTuple):
    reason: str
    opening: bool
    """Whether this rank was before its first batch."""


@dataclass(slots=True)
class _OfMainThread:
    """What the main thread notes, its signal handlers included; each fact is set once."""

    guarded: bool = False
    """Whether the run's cleanup code is in place to catch an exception from a signal handler."""
    begun: bool = False
    """Whether the first batch has come."""
    leaving: bool = False
    """Whether an exception already ends the run: handlers of an abandoned run raise only once."""


@dataclass(slots=True)
class _OfWatchdog:
    """What the watchdog's thread notes, in this order; each fact is set once."""

    reason: str = ""
    """That of the request in the store: the first of all ranks' requests."""
    learned_at: float = sys.float_info.max
    """When this rank learned of it (monotonic seconds)."""
    promise: _Position | None = None
    promises: list[_Position] = field(default_factory=list)
    """Those of all ranks, once all are known."""
    lost: str = ""
    """Why the store cannot be reached; empty while it can."""


class StopAgreement:
    """Interrupts a run on every rank after the same micro-batch or validation batch, wherever the ranks are at the signal.

    A promise moves ``hold_at``, and the agenda looks: its entry ``Interruption`` calls :meth:`hold` at that micro-batch.  The
    validation within ``fit`` compares ``evaluated`` with ``hold_evaluated`` itself.  With several ranks the watchdog thread
    of each rank calls :meth:`poll`.  When it finds a request, it promises a position where its main thread will hold, and publishes
    it; all ranks stop at the largest promise.  No rank can be past that position, no collective is needed, and a rank
    that waits for data or runs validation answers at once.  A rank that ends promises its last position, and nobody waits for it.

    Before the first batch there is nothing to save: a request ends the run at once, on all ranks.  After the last position to stop
    at, a request is only noted; the code that ends the run then checks for it (:meth:`came_late`, ``asked``).

    There are no locks: a signal handler could wait for one forever.  Those who request, the main thread and the watchdog's thread
    each note facts of their own, and take none back.  Everybody else asks for the :attr:`phase`, which follows from them.
    ``hold_at`` and ``hold_evaluated`` belong to the watchdog's thread until it has promised, and to the main thread once
    :attr:`settled`.

    Args:
        state: the run's counters.
        strategy: gives the number of ranks.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self._state = state
        self._strategy = strategy
        self._requests: list[_Request] = []  # of this rank; only appended to, in any thread and by signal handlers
        self._main = _OfMainThread()
        self._watchdog = _OfWatchdog()
        self._store: Store | None = None
        self._settled = threading.Event()
        self.signals = HeededSignals()
        self.shared = strategy.world_size > 1
        """Whether there are other ranks to agree with."""

    @property
    def phase(self) -> Phase:
        """How far the stop has come: what each writer has noted says which of these events there were.

        ========= ========= ========= ========= ========= =========
        phase     begin     request   found     agree     early
        ========= ========= ========= ========= ========= =========
        OPENING   RUNNING   ABANDONED ABANDONED -         -
        RUNNING   RUNNING   ASKED     PROMISED  -         -
        ASKED     ASKED     ASKED     PROMISED  -         -
        PROMISED  PROMISED  PROMISED  PROMISED  AGREED    ABANDONED
        AGREED    AGREED    AGREED    AGREED    AGREED    -
        ABANDONED ABANDONED ABANDONED ABANDONED -         ABANDONED
        ========= ========= ========= ========= ========= =========

        ``begin``: the first batch has come to the main thread.  ``request``: a signal has come to this rank, or one of its threads
        asks; a single rank agrees with itself, so RUNNING leads to AGREED.  The other events come to the watchdog's thread: it has
        ``found`` a request of any rank in the store, and made its promise; the promises of all ranks ``agree``, or one is that of a
        rank that was asked too ``early``.  These two need this rank's own promise first (-: cannot be).  The loss of the store
        leads nowhere: who waits for the answers is told of it.
        """
        # Read in the order in which they come, so that what this returns did hold while it read.
        begun = self._main.begun
        request = self._requests[0] if self._requests else None
        promise = self._watchdog.promise
        promises = self._watchdog.promises
        if _BEFORE_FIRST_BATCH in (promise, *promises) or (request is not None and request.opening):
            return Phase.ABANDONED
        if promises or (request is not None and not self.shared):
            return Phase.AGREED
        if promise is not None:
            return Phase.PROMISED
        if request is not None:
            return Phase.ASKED
        return Phase.RUNNING if begun else Phase.OPENING

    @property
    def abandoned(self) -> bool:
        """Whether the run ends at once, with nothing to save."""
        return self.phase is Phase.ABANDONED

    @property
    def answered(self) -> bool:
        """Whether this rank has promised where it waits, or ends at once."""
        return self.phase in (Phase.PROMISED, Phase.AGREED, Phase.ABANDONED)

    @property
    def settled(self) -> bool:
        """Whether the promises of all ranks are known, or the store is lost."""
        return self._settled.is_set()

    @property
    def asked(self) -> str:
        """The reason (signal) of this rank's own request, handled yet or not."""
        return self._requests[0].reason if self._requests else ""

    @property
    def reason(self) -> str:
        """Why all ranks stop; empty while this rank knows of no request."""
        return self._watchdog.reason or self.asked

    @property
    def learned_at(self) -> float:
        """When this rank learned of a request in the store (monotonic seconds)."""
        return self._watchdog.learned_at

    @property
    def lost(self) -> str:
        """Why the store cannot be reached; empty while it can."""
        return self._watchdog.lost

    # -- in any thread, and in signal handlers -----------------------------------------------------------------------------------

    def request(self, reason: str) -> None:
        """Requests all ranks to stop; safe on any rank, in any thread and in a signal handler: it takes no lock."""
        if self.asked or self.abandoned:
            return
        self._requests.append(_Request(reason, opening=not self._main.begun))
        if not self.shared:  # stop at the next comparison
            self._state.hold_at, self._state.hold_evaluated = _HERE

    # -- for the main thread and its signal handlers -----------------------------------------------------------------------------

    def guard(self) -> None:
        """Lets signal handlers raise from now on; raises KeyboardInterrupt if a signal arrived since the handlers were set."""
        self._main.guarded = True
        self.raise_once()

    def begin(self) -> None:
        """Notes that the first batch has come: from now on there are positions to stop at."""
        self._main.begun = True

    @property
    def leaving(self) -> bool:
        """Whether an exception already ends the run."""
        return self._main.leaving

    def note_exception(self) -> None:
        """Notes that an exception ends the run: from now on no signal handler of an abandoned run raises."""
        self._main.leaving = True

    def raise_once(self) -> None:
        """Raises KeyboardInterrupt once in an abandoned run, and only while it is guarded."""
        if self.abandoned and self._main.guarded and not self.leaving:
            self.note_exception()
            raise KeyboardInterrupt(self.reason)

    def hold(self) -> bool:
        """Waits for the common stop position; stops and returns True if it is here.

        The main thread calls it at the position that this rank promised, and again at the common one if that is later.
        """
        self.wait_for_answers()
        phase = self.phase
        if phase is Phase.ABANDONED:
            raise KeyboardInterrupt(self.reason)
        if phase is not Phase.AGREED:
            raise DistributedError(self.who_is_missing())
        stop_at = max(self._watchdog.promises, default=_HERE)
        if self._position() < stop_at:
            self._state.hold_at, self._state.hold_evaluated = stop_at
            return False
        self.forget()
        self._state.interrupt(self.reason)
        return True

    def wait_for_answers(self) -> None:
        """Waits until every rank has answered the request, for at most ``ANSWER_SECONDS``."""
        if self.shared:
            self._settled.wait(ANSWER_SECONDS)

    def forget(self) -> None:
        """Cancels the hold: the main thread runs on."""
        self._state.hold_at = sys.maxsize
        self._state.hold_evaluated = sys.maxsize

    def ended_early(self, *, here: bool) -> bool:
        """Returns whether any rank was interrupted in the phase that ends now; if so, all ranks become interrupted.

        Every rank calls it, with ``here`` for its own answer (one small collective).
        """
        number = 1 + INTERRUPTIONS.index(self._state.stop_request.interruption or self.reason) if here else 0
        if self.shared:
            # A rank that had no batch left may not have reached the position where the others stopped.
            number = int(self._strategy.reduce(torch.tensor(number, dtype=torch.int64, device="cpu"), "max").item())
        if number and not self._state.interrupted:
            self.forget()
            self._state.interrupt(INTERRUPTIONS[number - 1])
        return number > 0

    def came_late(self) -> bool:
        """Returns whether any rank got a signal after its last stop position; if so, all are interrupted.  Every rank calls it."""
        return self.ended_early(here=self._state.interrupted or bool(self.asked))

    # -- for the watchdog's thread -----------------------------------------------------------------------------------------------

    def poll(self, store: Store) -> None:
        """Polls the store once: publishes this rank's request, answers any rank's request, reads the answers."""
        if self.settled:
            return
        self._store = store
        for reason in self.signals.arrived():
            self.request(reason)
        if self._watchdog.promise is None:
            if self.asked:
                store.compare_set(_REQUEST, "", self.asked)
            if not store.check([_REQUEST]):
                return
            self._watchdog.reason = store.get(_REQUEST).decode()
            self._watchdog.learned_at = time.monotonic()
            early = self.phase in (Phase.OPENING, Phase.ABANDONED)
            self._watchdog.promise = _BEFORE_FIRST_BATCH if early else self._promise()
            self._publish(store, self._watchdog.promise)
        keys = [_promise_key(rank) for rank in range(self._strategy.world_size)]
        if store.check(keys):
            self._watchdog.promises = [_parsed(value) for value in store.multi_get(keys)]
            self._settled.set()

    def _promise(self) -> _Position:
        """Sets and returns a position where the main thread will hold, and that it cannot have passed.

        The main thread increments its count, then compares it.  If the count is still below the promise after the promise is set,
        the comparison will see the promise.
        """
        while True:
            promise = self._next_position()
            self._state.hold_at, self._state.hold_evaluated = promise
            if self._position() < promise:
                return promise

    def _next_position(self) -> _Position:
        """Returns the first position after the current one."""
        batches, evaluated = self._position()
        if evaluated != NOT_VALIDATING:
            return batches, evaluated + 1
        return batches + 1, 1

    def _publish(self, store: Store, promise: _Position) -> None:
        batches, evaluated = promise
        store.set(_promise_key(self._strategy.rank), f"{batches} {evaluated}")

    def _position(self) -> _Position:
        """Returns the main thread's position; reads again if ``batches_done`` changed between the two reads."""
        state = self._state
        while True:
            position = (state.batches_done, state.evaluated)
            if state.batches_done == position[0]:
                return position

    def leave(self, store: Store) -> None:
        """Publishes the position where this rank has ended, unless it has promised another one; the thread ends then."""
        if self._watchdog.promise is None:
            self._publish(store, (self._state.batches_done, 0))

    def note_store_lost(self, why: str) -> None:
        """Notes that the store is gone with its owner process, and wakes a main thread that waits in :meth:`hold`."""
        self._watchdog.lost = why
        self._settled.set()

    def interrupt_main_thread(self) -> None:
        """Interrupts the main thread of an abandoned run, wherever it is, unless an exception ends it already."""
        if not self.leaving:
            self.signals.simulate()

    # -- who has not answered ----------------------------------------------------------------------------------------------------

    def who_is_missing(self) -> str:
        """Returns the error message that names the ranks that have not answered."""
        why = f"; the store of the process group is gone ({self.lost.splitlines()[0]})" if self.lost else ""
        if self._store is not None and not self.lost:
            missing = ", ".join(map(str, self.missing(self._store)))
            why = f": no answer from rank {missing} within {ANSWER_SECONDS:g} s"
        return (
            f"rank {self._strategy.rank} was asked to stop ({self.reason}) and waited at micro-batch "
            f"{self._state.batches_done} for the ranks to agree where{why}; see what ended or blocks them"
        )

    def missing(self, store: Store) -> list[int]:
        """Returns the ranks that have not answered yet; empty if the store cannot be reached."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self._strategy.world_size) if not store.check([_promise_key(rank)])]
        return []


def _promise_key(rank: int) -> str:
    return f"promise/{rank}"


def _parsed(value: bytes) -> _Position:
    batches, evaluated = value.split()
    return int(batches), int(evaluated)
