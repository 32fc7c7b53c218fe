"""Ends training on every rank behind the same step, whoever asks: each says how far it is, and who asks waits for that."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from fabricamp.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

_ASKED = "asked"
_ENDED = float("inf")

_Word = tuple[float, float]
"""The last boundary that a rank has passed, and the last one at which it asked to stop."""


class LoopRequests:
    """What the loop itself asks for (``should_stop``, ``max_time``) counts at a boundary: the end of a step or of an epoch.

    A boundary is a number that grows on every rank alike.  A rank that does not ask passes it, and pays one plain store::

        if state.should_stop and requests.all_ask(boundary):
            break
        state.passed = boundary

    One that asks waits there for a word of every other one.  All asked here: all stop here.  One is past it: this one goes on, and
    asks again at the next.  Meanwhile the threads beside the ranks have told all of it, so that all ask.

    Ranks decide alike.  To stop, all have to ask at the boundary; to pass it, one has to have passed it before, and the first
    of those did not ask.

    Args:
        state: the run's counters.
        strategy: says how many ranks there are, and how long they wait for each other.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self._state = state
        self._rank = strategy.rank
        self._world_size = strategy.world_size
        self._timeout = strategy.timeout.total_seconds()
        self._reason = ""  # why this rank asks
        self._asks_at = -1.0
        self._first = ""  # why the first of all asks
        self._said: _Word | None = None
        self._words: list[_Word] = []
        self._news = threading.Event()
        self._lost = ""

    @property
    def urgent(self) -> bool:
        """Whether somebody asks, and may be waiting for an answer."""
        return bool(self._reason or self._first)

    def spread(self) -> None:
        """Lets all ranks know that this one asks; it goes on, since ``min_steps`` or ``min_epochs`` let nobody stop yet."""
        self._reason = self._state.stop_reason

    def all_ask(self, boundary: float) -> bool:
        """Whether all ranks ask to stop at ``boundary``; waits for those that have not come to it."""
        if self._world_size == 1:
            self._state.agreed = True
            return True
        self._asks_at = boundary
        self.spread()
        deadline = time.monotonic() + self._timeout
        while True:
            self._news.clear()
            decided = self._decide(boundary)
            if decided:
                self._state.agreed, self._state.stop_reason = True, self._first
            if decided is not None:
                return decided
            if self._lost or not self._news.wait(max(deadline - time.monotonic(), 0)):
                raise DistributedError(self._who_is_missing(boundary))

    def _decide(self, boundary: float) -> bool | None:
        others = [word for rank, word in enumerate(self._words) if rank != self._rank]
        if any(passed >= boundary for passed, _ in others):
            return False
        return True if others and all(asks_at == boundary for _, asks_at in others) else None

    def _who_is_missing(self, boundary: float) -> str:
        why = (
            f"the store of the process group is gone ({self._lost})"
            if self._lost
            else f"not within {self._timeout:g} s"
        )
        late = [
            rank
            for rank, (passed, asks_at) in enumerate(self._words)
            if rank != self._rank and passed < boundary and asks_at != boundary
        ]
        named = f"rank {', '.join(map(str, late))}" if late else "the other ranks"
        return (
            f"rank {self._rank} asked to stop ({self._state.stop_reason}) behind micro-batch {self._state.batches_done}, and "
            f"{named} did not come to it: {why}; see what ended or blocks them"
        )

    # -- for the thread beside the main one --------------------------------------------------------------------------------------

    def look(self, store: Store) -> None:
        """One look into the store: tells that this rank asks, learns that another does; then says and hears where all are."""
        if not self._first:
            if self._reason:
                store.compare_set(_ASKED, "", self._reason)
            if not store.check([_ASKED]):
                return
            self._first = store.get(_ASKED).decode()
            self._state.ask(self._first)
        self._say(store, (self._state.passed, self._asks_at))
        keys = [_word_key(rank) for rank in range(self._world_size)]
        if not store.check(keys):
            return
        words = [_parsed(word) for word in store.multi_get(keys)]
        if words != self._words:
            self._words = words
            self._news.set()

    def leave(self, store: Store) -> None:
        """The last word: this rank is past every boundary, but for one at which it stopped."""
        self._say(store, (self._state.passed if self._state.agreed else _ENDED, self._asks_at))

    def lose(self, why: str) -> None:
        """The store went with the process that owns it; who waits must learn of it."""
        self._lost = why.partition("\n")[0]
        self._news.set()

    def _say(self, store: Store, word: _Word) -> None:
        if word != self._said:
            self._said = word
            store.set(_word_key(self._rank), f"{word[0]} {word[1]}")


def _word_key(rank: int) -> str:
    return f"word/{rank}"


def _parsed(word: bytes) -> _Word:
    passed, asks_at = word.split()
    return float(passed), float(asks_at)
