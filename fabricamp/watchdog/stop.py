"""Interrupts a run on every rank at the same position, whichever rank gets the signal: by promises, without a collective."""

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
"""A rank counts as gone if its watchdog thread answers no request for this long; that thread never waits for the main thread."""

_REQUEST = "request"

_Position = tuple[int, int]
"""(micro-batches done, batches done of the validation after them; ``NOT_VALIDATING`` once that validation is over)."""

_BEFORE_FIRST_BATCH: _Position = (-1, 0)
"""The promise of a rank before its first batch: there is nothing to save, and nobody needs to wait for that rank."""


class StopAgreement:
    """Interrupts a run on every rank after the same micro-batch or validation batch, wherever the ranks are at the signal.

    A promise moves ``hold_at``, and the agenda looks: its entry ``Interruption`` calls :meth:`hold` at that micro-batch.  The
    validation within ``fit`` compares ``evaluated`` with ``hold_evaluated`` itself.  With several ranks the watchdog thread
    of each rank calls :meth:`poll`.  When it finds a request, it promises a position where its main thread will hold, and publishes
    it; all ranks stop at the largest promise.  No rank can be past that position, no collective is needed, and a rank
    that waits for data or runs validation answers at once.  A rank that ends promises its last position, and nobody waits for it.

    Before the first batch there is nothing to save: with ``opening`` set, signal handlers end the run at once, on all ranks
    (``abandoned``).  After the last position to stop at, a request is only noted; the code that ends the run then checks for it
    (:meth:`came_late`, ``asked``).

    Args:
        state: the run's counters.
        strategy: gives the number of ranks.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self._state = state
        self._strategy = strategy
        self._stop_at: _Position | None = None
        self._promised = False
        self._store: Store | None = None
        self._settled = threading.Event()
        self.asked = ""
        """The reason (signal) of this rank's own request, handled yet or not."""
        self.opening = True
        """Whether the run is still before its first batch."""
        self.guarded = False
        """Whether the run's cleanup code is in place to catch an exception from a signal handler."""
        self.abandoned = False
        """Whether the run ends at once, with nothing to save."""
        self.leaving = False
        """Whether an exception already ends the run in the main thread: handlers of an abandoned run raise only once."""
        self.handled: dict[int, str] = {}
        """Signal number -> the reason that its handler passes to :meth:`request`."""
        self.signal_fd: int | None = None
        """File descriptor from which signal numbers can be read as soon as they arrive."""
        self.reason = ""
        """Why all ranks stop; empty until this rank has learned of a request."""
        self.learned_at = sys.float_info.max
        """When this rank learned of a request (monotonic seconds)."""
        self.lost = ""
        """Why the store cannot be reached; empty while it can."""

    @property
    def shared(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self._strategy.world_size > 1

    @property
    def settled(self) -> bool:
        """Whether the common stop position is known, or the store is lost."""
        return self._settled.is_set()

    def request(self, reason: str) -> None:
        """Requests all ranks to stop; safe on any rank, in any thread and in a signal handler: it only sets plain attributes."""
        if self.asked:
            return
        self.asked = reason
        if self._strategy.world_size == 1:
            # With one rank there is nobody to agree with: stop at the next comparison.
            self.reason = reason
            self._state.hold_at = 0
            self._state.hold_evaluated = 0

    def abandon(self) -> None:
        """Marks the run to end at once, because there is nothing to save: a rank was ``opening`` at the signal."""
        self.reason = self.reason or self.asked
        self.abandoned = True

    def guard(self) -> None:
        """Lets signal handlers raise from now on; raises KeyboardInterrupt if a signal arrived since the handlers were set."""
        self.guarded = True
        self.raise_once()

    def raise_once(self) -> None:
        """Raises KeyboardInterrupt once in an abandoned run, and only while it is guarded."""
        if self.abandoned and self.guarded and not self.leaving:
            self.leaving = True
            raise KeyboardInterrupt(self.reason)

    def interrupt_main_thread(self) -> None:
        """Simulates a signal in the main thread, which raises there; called by the watchdog thread."""
        if self.handled and not self.leaving:
            _thread.interrupt_main(signal.Signals(next(iter(self.handled))))

    def begin(self) -> None:
        """Marks that the first batch has come: from now on there are positions to stop at."""
        self.opening = False

    def hold(self) -> bool:
        """Waits for the common stop position; stops and returns True if it is here.

        The main thread calls it at the position that this rank promised, and again at the common one if that is later.
        """
        if self._strategy.world_size > 1:
            self.wait_for_answers()
            if self.abandoned:
                raise KeyboardInterrupt(self.reason)
            if self._stop_at is None:
                raise DistributedError(self.who_is_missing())
            if self._position() < self._stop_at:
                self._state.hold_at, self._state.hold_evaluated = self._stop_at
                return False
        self.forget()
        self._state.interrupt(self.reason)
        return True

    def wait_for_answers(self) -> None:
        """Waits until every rank has answered the request, for at most ``ANSWER_SECONDS``."""
        if self._strategy.world_size > 1:
            self._settled.wait(ANSWER_SECONDS)

    def forget(self) -> None:
        """Cancels the hold: the main thread runs on."""
        self._state.hold_at = sys.maxsize
        self._state.hold_evaluated = sys.maxsize

    def ended_early(self, *, here: bool) -> bool:
        """Returns whether any rank was interrupted in the phase that ends now; if so, all ranks become interrupted.

        Every rank calls it, with ``here`` for its own answer (one small collective).
        """
        reason = self._state.stop_request.interruption or self.reason or self.asked
        number = 1 + INTERRUPTIONS.index(reason) if here else 0
        if self._strategy.world_size > 1:
            # A rank that had no batch left may not have reached the position where the others stopped.
            number = int(self._strategy.reduce(torch.tensor(number, dtype=torch.int64, device="cpu"), "max").item())
        if number and not self._state.interrupted:
            self.forget()
            self._state.interrupt(INTERRUPTIONS[number - 1])
        return number > 0

    def came_late(self) -> bool:
        """Returns whether any rank got a signal after its last stop position; if so, all are interrupted.  Every rank calls it."""
        return self.ended_early(here=self._state.interrupted or bool(self.asked))

    # -- for the watchdog thread -------------------------------------------------------------------------------------------------

    def poll(self, store: Store) -> None:
        """Polls the store once: publishes this rank's request, answers any rank's request, reads the answers."""
        if self._settled.is_set():
            return
        self._store = store
        self._read_signals()
        if not self._promised:
            if self.asked:
                store.compare_set(_REQUEST, "", self.asked)
            if not store.check([_REQUEST]):
                return
            self.reason = store.get(_REQUEST).decode()
            self.learned_at = time.monotonic()
            if self.opening:
                self.abandon()
            self._publish(store, _BEFORE_FIRST_BATCH if self.abandoned else self._promise())
        keys = [_promise_key(rank) for rank in range(self._strategy.world_size)]
        if store.check(keys):
            promises = [_parsed(value) for value in store.multi_get(keys)]
            self._stop_at = max(promises)
            self.abandoned = self.abandoned or _BEFORE_FIRST_BATCH in promises
            self._settled.set()

    def _read_signals(self) -> None:
        """Turns a signal into a request while its handler still waits for the main thread to return from compiled code."""
        if self.signal_fd is None:
            return
        with contextlib.suppress(BlockingIOError):  # raised if no signal has arrived
            for number in os.read(self.signal_fd, 64):
                if number in self.handled and not self.abandoned:
                    self.request(self.handled[number])

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
        self._promised = True
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
        """Promises the position where this rank has ended, unless it has promised another one."""
        if not self._promised:
            self._publish(store, (self._state.batches_done, 0))

    def note_store_lost(self, why: str) -> None:
        """Notes that the store is gone with its owner process, and wakes a main thread that waits in :meth:`hold`."""
        self.lost = why
        self._settled.set()

    def who_is_missing(self) -> str:
        """Returns the error message that names the ranks that have not answered."""
        why = f"; the store of the process group is gone ({self.lost.splitlines()[0]})" if self.lost else ""
        if self._store is not None and not self.lost:
            missing = ", ".join(map(str, self.missing(self._store)))
            why = f": no answer from rank {missing} within {ANSWER_SECONDS:g} s"
        return (
            f"rank {self._strategy.rank} was asked to stop ({self.reason or self.asked}) and waited at micro-batch "
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
