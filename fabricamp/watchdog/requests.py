"""Ends training on every rank after the same step, whichever rank asks: ranks publish their progress, and an asking rank waits."""

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

_Progress = tuple[float, float]
"""(last boundary that a rank has passed, last boundary at which it asked to stop)."""


class LoopRequests:
    """Stop requests of the loop itself (``should_stop``, ``max_time``), which count at a boundary: the end of a step or epoch.

    A boundary is a number that grows equally on every rank.  A rank that does not ask passes it, at the cost of one assignment::

        if state.should_stop and requests.all_ask(boundary):
            break
        agenda.passed = boundary  # not state.passed, whose setter makes the agenda look

    A rank that asks waits there for every other rank's published progress.  If all ranks ask at this boundary, all stop here.  If
    one has passed it, this rank continues and asks again at the next boundary.  Meanwhile the watchdog threads spread the request,
    until all ranks ask.

    All ranks decide the same.  They stop only if all of them ask at the boundary.  An asking rank continues only if another rank
    has passed the boundary, and the first rank to pass it did not ask.

    Args:
        state: the run's counters.
        strategy: gives the number of ranks, and how long they wait for each other.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self._state = state
        self._rank = strategy.rank
        self._world_size = strategy.world_size
        self._timeout = strategy.timeout.total_seconds()
        self._reason = ""  # why this rank asks
        self._asks_at = -1.0
        self._first = ""  # why the first rank that asked does
        self._published: _Progress | None = None
        self._progress: list[_Progress] = []  # of all ranks
        self._changed = threading.Event()  # for a main thread that waits: progress, or the loss of the store
        self._lost = ""  # why the store is gone

    @property
    def urgent(self) -> bool:
        """Whether any rank asks, and may be waiting for an answer."""
        return bool(self._reason or self._first)

    def spread(self) -> None:
        """Publishes this rank's request without waiting: ``min_steps`` or ``min_epochs`` do not allow any rank to stop yet."""
        self._reason = self._state.stop_request.reason

    def all_ask(self, boundary: float) -> bool:
        """Returns whether all ranks ask to stop at ``boundary``; waits for ranks that have not reached it.

        Raises :class:`DistributedError` if they do not reach it within the strategy's timeout, or if the store is lost.
        """
        if self._world_size == 1:
            self._state.stop_request.agreed = True
            return True
        self._asks_at = boundary
        self.spread()
        deadline = time.monotonic() + self._timeout
        while True:
            self._changed.clear()
            decided = self._decide(boundary)
            if decided:
                self._state.stop_request.agreed = True
                self._state.stop_request.reason = self._first
            if decided is not None:
                return decided
            if self._lost or not self._changed.wait(max(deadline - time.monotonic(), 0)):
                raise DistributedError(self._who_is_missing(boundary))

    def _decide(self, boundary: float) -> bool | None:
        """Returns whether to stop at ``boundary``; None while another rank is on the way to it."""
        others = [progress for rank, progress in enumerate(self._progress) if rank != self._rank]
        if any(passed >= boundary for passed, _ in others):
            return False
        if others and all(asks_at == boundary for _, asks_at in others):
            return True
        return None

    def _who_is_missing(self, boundary: float) -> str:
        why = f"not within {self._timeout:g} s"
        if self._lost:
            why = f"the store of the process group is gone ({self._lost})"
        late = [
            rank
            for rank, (passed, asks_at) in enumerate(self._progress)
            if rank != self._rank and passed < boundary and asks_at != boundary
        ]
        named = f"rank {', '.join(map(str, late))}" if late else "the other ranks"
        return (
            f"rank {self._rank} asked to stop ({self._state.stop_request.reason}) after micro-batch "
            f"{self._state.batches_done}, and {named} did not reach it: {why}; see what ended or blocks them"
        )

    # -- for the watchdog thread -------------------------------------------------------------------------------------------------

    def poll(self, store: Store) -> None:
        """Polls the store once: publishes or learns of a request; after a request, also exchanges the ranks' progress."""
        if not self._first:
            if self._reason:
                store.compare_set(_ASKED, "", self._reason)
            if not store.check([_ASKED]):
                return
            self._first = store.get(_ASKED).decode()
            self._state.ask(self._first)
        self._publish(store, (self._state.agenda.passed, self._asks_at))
        keys = [_progress_key(rank) for rank in range(self._world_size)]
        if not store.check(keys):
            return
        progress = [_parsed(text) for text in store.multi_get(keys)]
        if progress != self._progress:
            self._progress = progress
            self._changed.set()

    def leave(self, store: Store) -> None:
        """Publishes the final progress: this rank is past every boundary, unless it stopped at one by agreement."""
        passed = self._state.agenda.passed if self._state.stop_request.agreed else _ENDED
        self._publish(store, (passed, self._asks_at))

    def note_store_lost(self, why: str) -> None:
        """Notes that the store is gone with its owner process, and wakes a main thread that waits in :meth:`all_ask`."""
        self._lost = why.partition("\n")[0]
        self._changed.set()

    def _publish(self, store: Store, progress: _Progress) -> None:
        if progress != self._published:
            self._published = progress
            passed, asks_at = progress
            store.set(_progress_key(self._rank), f"{passed} {asks_at}")


def _progress_key(rank: int) -> str:
    return f"progress/{rank}"


def _parsed(text: bytes) -> _Progress:
    passed, asks_at = text.split()
    return float(passed), float(asks_at)
