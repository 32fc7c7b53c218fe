"""Ends a run on every rank at the same place, whichever rank asks: promises instead of a collective."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from fabricamp.errors import DistributedError
from fabricamp.state import INTERRUPTIONS, NOT_VALIDATING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

__all__ = ["ANSWER_SECONDS", "StopAgreement"]

ANSWER_SECONDS = 10.0
"""A rank whose thread has not answered a request for so long is gone: it need not wait for its main thread."""

_REQUEST = "request"

_Place = tuple[int, int]
"""Micro-batches done, and batches done of the validation that follows them (``NOT_VALIDATING`` once that is over)."""


class StopAgreement:
    """Ends a run on every rank after the same micro-batch or validation batch, wherever the ranks are when one asks.

    The main thread pays one comparison per micro-batch::

        state.batches_done += 1
        if state.batches_done >= state.hold_at:
            agreement.hold()

    and the like with ``evaluated`` and ``hold_evaluated`` in the validation within ``fit``.  With several ranks a thread beside
    each of them calls :meth:`look`.  When it finds a request it promises where the main thread will hold and publishes that;
    the largest promise is where all stop.  No rank is past it then, no collective is needed, and a rank that waits for data or
    validates promises at once.  A rank that ends promises the place where it ended, so that nobody waits for it.

    Args:
        state: the run's counters.
        strategy: says how many ranks there are.
        timeout: seconds that a rank which holds waits for the others' promises (which do not need their main threads).
    """

    def __init__(self, state: RunState, strategy: Strategy, timeout: float = ANSWER_SECONDS) -> None:
        self._state = state
        self._strategy = strategy
        self._timeout = timeout
        self._asked = ""
        self._stop_at: _Place | None = None
        self._published = False
        self._store: Store | None = None
        self._settled = threading.Event()
        self.reason = ""
        """Why all stop, once this rank has learned of it."""
        self.learned_at = sys.float_info.max
        """When this rank learned of a request (monotonic seconds)."""
        self.lost = ""
        """Why the store cannot be reached any more."""

    @property
    def settled(self) -> bool:
        """Whether it is known where all stop."""
        return self._settled.is_set()

    def request(self, reason: str) -> None:
        """Asks all ranks to stop; from any rank, any thread or a signal handler: it only sets plain attributes."""
        if self._asked:
            return
        self._asked = reason
        if self._strategy.world_size == 1:
            # Nobody to agree with: at the next comparison.
            self.reason = reason
            self._state.hold_at = 0
            self._state.hold_evaluated = 0 if reason in INTERRUPTIONS else sys.maxsize

    def hold(self) -> bool:
        """Called by the main thread where it promised to: learns where all stop; stops and returns True if that is here."""
        if self._strategy.world_size > 1:
            if not self._settled.wait(self._timeout) or self._stop_at is None:
                raise DistributedError(self.who_is_missing())
            if self._here() < self._stop_at:
                self._state.hold_at, self._state.hold_evaluated = self._stop_at
                return False
        self.forget()
        self._state.stop(self.reason)
        return True

    def forget(self) -> None:
        """Nobody holds any more."""
        self._state.hold_at = self._state.hold_evaluated = sys.maxsize

    def ended_early(self, *, here: bool) -> bool:
        """Whether any rank stopped in the evaluation that ends now; every rank says whether it did (one small collective)."""
        if self._strategy.world_size == 1:
            return here
        anywhere = bool(self._strategy.reduce(torch.tensor(here), "max").item())
        if anywhere and not here:
            # A rank that had no batch left may not have come to the place where the others stopped.
            self.forget()
            self._state.stop(self.reason or self._asked or INTERRUPTIONS[0])
        return anywhere

    # -- for the thread beside the main one --------------------------------------------------------------------------------------

    def look(self, store: Store) -> None:
        """One look into the store: publishes this rank's request, answers anyone's, reads the answers."""
        if self._settled.is_set():
            return
        self._store = store
        if not self._published:
            if self._asked:
                store.compare_set(_REQUEST, "", self._asked)
            if not store.check([_REQUEST]):
                return
            self.reason = store.get(_REQUEST).decode()
            self.learned_at = time.monotonic()
            self._publish(store, self._promise())
        keys = [_promise_key(rank) for rank in range(self._strategy.world_size)]
        if store.check(keys):
            self._stop_at = max(_parsed(value) for value in store.multi_get(keys))
            self._settled.set()

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
            why = f": no answer from rank {missing} within {self._timeout:g} s"
        return (
            f"rank {self._strategy.rank} was asked to stop ({self.reason or self._asked}) and waited at micro-batch "
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
        """The first place behind this one; but what ends training by itself lets a validation come to its end."""
        batches, evaluated = self._here()
        validating = evaluated != NOT_VALIDATING
        if self.reason not in INTERRUPTIONS:
            return (batches if validating else batches + 1), NOT_VALIDATING
        return (batches, evaluated + 1) if validating else (batches + 1, 1)

    def _publish(self, store: Store, place: _Place) -> None:
        self._published = True
        store.set(_promise_key(self._strategy.rank), f"{place[0]} {place[1]}")


def _promise_key(rank: int) -> str:
    return f"promise/{rank}"


def _parsed(value: bytes) -> _Place:
    batches, evaluated = value.split()
    return int(batches), int(evaluated)
