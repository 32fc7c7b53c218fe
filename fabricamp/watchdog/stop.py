"""Cuts a run on every rank at the same place, whichever rank gets the signal: promises instead of a collective."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from fabricamp.errors import DistributedError
from fabricamp.state import INTERRUPTIONS, NOT_VALIDATING, RunState

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from fabricamp.strategies.base import Strategy

ANSWER_SECONDS = 10.0
"""A rank whose thread has not answered a request for so long is gone: it need not wait for its main thread."""

_REQUEST = "request"

_Place = tuple[int, int]
"""Micro-batches done, and batches done of the validation that follows them (``NOT_VALIDATING`` once that is over)."""

_NOWHERE: _Place = (-1, 0)
"""What a rank that has not come to its first batch promises: there is nothing to save, and nobody needs to wait for it."""


class StopAgreement:
    """Cuts a run on every rank after the same micro-batch or validation batch, wherever the ranks are when one gets a signal.

    The main thread pays one comparison per micro-batch::

        state.batches_done += 1
        if state.batches_done >= state.hold_at:
            agreement.hold()

    and the like with ``evaluated`` and ``hold_evaluated`` in the validation within ``fit``.  With several ranks a thread beside
    each of them calls :meth:`look`.  When it finds a request it promises where the main thread will hold and publishes that;
    the largest promise is where all stop.  No rank is past it then, no collective is needed, and a rank that waits for data or
    validates promises at once.  A rank that ends promises the place where it ended, so that nobody waits for it.

    Before the first batch there is nothing to save: ``opening`` tells the handlers of signals to end the run at once, on all
    ranks (``abandoned``).  Behind the last place to stop at a request is noted, and heeded by whoever ends the run
    (:meth:`came_late`, ``asked``).

    Args:
        state: the run's counters.
        strategy: says how many ranks there are.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self._state = state
        self._strategy = strategy
        self._stop_at: _Place | None = None
        self._published = False
        self._store: Store | None = None
        self._settled = threading.Event()
        self.asked = ""
        """The signal that this rank got, heeded yet or not."""
        self.opening = True
        """Whether the first batch is still to come."""
        self.guarded = False
        """Whether who gives the run's parts back is there to catch what a handler raises."""
        self.abandoned = False
        """Whether the run ends at once, with nothing to save."""
        self.leaving = False
        """Whether the main thread knows of that."""
        self.handled: dict[int, str] = {}
        """The signals whose handlers ask here, and the reasons that they give."""
        self.ears: int | None = None
        """Where the numbers of signals can be read as soon as they come."""
        self.reason = ""
        """Why all stop, once this rank has learned of it."""
        self.learned_at = sys.float_info.max
        """When this rank learned of a request (monotonic seconds)."""
        self.lost = ""
        """Why the store cannot be reached any more."""

    @property
    def shared(self) -> bool:
        """Whether there is anybody to agree with."""
        return self._strategy.world_size > 1

    @property
    def settled(self) -> bool:
        """Whether it is known where all stop."""
        return self._settled.is_set()

    def request(self, reason: str) -> None:
        """Asks all ranks to stop; from any rank, any thread or a signal handler: it only sets plain attributes."""
        if self.asked:
            return
        self.asked = reason
        if self._strategy.world_size == 1:
            # Nobody to agree with: at the next comparison.
            self.reason = reason
            self._state.hold_at = self._state.hold_evaluated = 0

    def abandon(self) -> None:
        """Ends the run at once, for want of anything to save: where a signal finds this rank ``opening``."""
        self.reason = self.reason or self.asked
        self.abandoned = True

    def guard(self) -> None:
        """From here on handlers raise; raises KeyboardInterrupt where a signal has come since they were set."""
        self.guarded = True
        self.raise_once()

    def raise_once(self) -> None:
        """Raises KeyboardInterrupt in a run that is abandoned, for the first time and where it is caught."""
        if self.abandoned and self.guarded and not self.leaving:
            self.leaving = True
            raise KeyboardInterrupt(self.reason)

    def tell_main_thread(self) -> None:
        """Raises in the main thread what a signal there would have; for the thread beside it."""
        if self.handled and not self.leaving:
            _thread.interrupt_main(signal.Signals(next(iter(self.handled))))

    def begin(self) -> None:
        """From here on there are places to stop at."""
        self.opening = False

    def hold(self) -> bool:
        """Called by the main thread where it promised to: learns where all stop; stops and returns True if that is here."""
        if self._strategy.world_size > 1:
            self.wait_for_answers()
            if self.abandoned:
                raise KeyboardInterrupt(self.reason)
            if self._stop_at is None:
                raise DistributedError(self.who_is_missing())
            if self._here() < self._stop_at:
                self._state.hold_at, self._state.hold_evaluated = self._stop_at
                return False
        self.forget()
        self._state.interrupt(self.reason)
        return True

    def wait_for_answers(self) -> None:
        """Waits until every rank has answered the request, or could have."""
        if self._strategy.world_size > 1:
            self._settled.wait(ANSWER_SECONDS)

    def forget(self) -> None:
        """Nobody holds any more."""
        self._state.hold_at = self._state.hold_evaluated = sys.maxsize

    def ended_early(self, *, here: bool) -> bool:
        """Whether any rank was cut in what ends now; every rank says whether it was (one small collective), and then all are."""
        reason = self._state.interruption or self.reason or self.asked
        number = 1 + INTERRUPTIONS.index(reason) if here else 0
        if self._strategy.world_size > 1:
            # A rank that had no batch left may not have come to the place where the others stopped.
            number = int(self._strategy.reduce(torch.tensor(number, dtype=torch.int64, device="cpu"), "max").item())
        if number and not self._state.interrupted:
            self.forget()
            self._state.interrupt(INTERRUPTIONS[number - 1])
        return number > 0

    def came_late(self) -> bool:
        """Whether a signal came to any rank behind its last place to stop at; every rank asks, and then all are cut."""
        return self.ended_early(here=self._state.interrupted or bool(self.asked))

    # -- for the thread beside the main one --------------------------------------------------------------------------------------

    def look(self, store: Store) -> None:
        """One look into the store: publishes this rank's request, answers anyone's, reads the answers."""
        if self._settled.is_set():
            return
        self._store = store
        self._hear()
        if not self._published:
            if self.asked:
                store.compare_set(_REQUEST, "", self.asked)
            if not store.check([_REQUEST]):
                return
            self.reason = store.get(_REQUEST).decode()
            self.learned_at = time.monotonic()
            if self.opening:
                self.abandon()
            self._publish(store, _NOWHERE if self.abandoned else self._promise())
        keys = [_promise_key(rank) for rank in range(self._strategy.world_size)]
        if store.check(keys):
            places = [_parsed(value) for value in store.multi_get(keys)]
            self._stop_at = max(places)
            self.abandoned = self.abandoned or _NOWHERE in places
            self._settled.set()

    def _hear(self) -> None:
        """Takes note of a signal whose handler has to wait until the main thread is back from compiled code."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self.ears, 64) if self.ears is not None else b"":
                if number in self.handled and not self.abandoned:
                    self.request(self.handled[number])

    def leave(self, store: Store) -> None:
        """Promises the place where this rank has ended, if it has not promised another."""
        if not self._published:
            self._publish(store, (self._state.batches_done, 0))

    def lose(self, why: str) -> None:
        """The store went with the process that owns it; who holds must learn of it."""
        self.lost = why
        self._settled.set()

    def who_is_missing(self) -> str:
        """Says which rank has not answered."""
        why = f"; the store of the process group is gone ({self.lost.splitlines()[0]})" if self.lost else ""
        if self._store is not None and not self.lost:
            missing = ", ".join(map(str, self.missing(self._store)))
            why = f": no answer from rank {missing} within {ANSWER_SECONDS:g} s"
        return (
            f"rank {self._strategy.rank} was asked to stop ({self.reason or self.asked}) and waited at micro-batch "
            f"{self._state.batches_done} for the ranks to agree where{why}; see what ended or blocks them"
        )

    def missing(self, store: Store) -> list[int]:
        """The ranks that have not answered yet."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self._strategy.world_size) if not store.check([_promise_key(rank)])]
        return []

    def _here(self) -> _Place:
        """Where the main thread is; the two counters are read at one moment, which is one without a change of the first."""
        state = self._state
        while True:
            batches = state.batches_done
            place = batches, state.evaluated
            if state.batches_done == batches:
                return place

    def _promise(self) -> _Place:
        """Sets where the main thread holds, at a place that it cannot have passed, and returns it.

        The main thread counts, then compares: a count still below the promise once that is set will be compared with it.
        """
        while True:
            promise = self._next_place()
            self._state.hold_at, self._state.hold_evaluated = promise
            if self._here() < promise:
                return promise

    def _next_place(self) -> _Place:
        """The first place behind this one."""
        batches, evaluated = self._here()
        return (batches, evaluated + 1) if evaluated != NOT_VALIDATING else (batches + 1, 1)

    def _publish(self, store: Store, place: _Place) -> None:
        self._published = True
        store.set(_promise_key(self._strategy.rank), f"{place[0]} {place[1]}")


def _promise_key(rank: int) -> str:
    return f"promise/{rank}"


def _parsed(value: bytes) -> _Place:
    batches, evaluated = value.split()
    return int(batches), int(evaluated)
