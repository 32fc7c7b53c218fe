"""Watching over a run from beside it: any rank may ask to stop, and all stop after the same micro-batch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from fabricamp.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from torch.distributed.distributed_c10d import Store

    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

__all__ = ["StopAgreement", "interrupts"]

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
_REQUEST = "request"

# How far ahead a rank promises to hold: its main thread may be between its comparison and its next count.
_AHEAD = 2


class StopAgreement:
    """Ends a run on every rank after the same micro-batch, whichever rank asks and wherever the others are.

    The main thread pays one comparison per micro-batch::

        state.batches_done += 1
        if state.batches_done >= state.hold_at:
            agreement.hold()

    With several ranks a thread beside each of them looks into the process group's store.  When it finds a request it
    promises where the main thread will hold and publishes that; the largest promise is where all stop.  No rank is past
    it then, no collective is needed, and a rank that waits for data or validates promises at once.  A rank that closes
    promises the position where it ended, so that nobody waits for it.

    Args:
        state: the run's counters.
        strategy: says how many ranks there are.
        timeout: seconds that a rank which holds waits for the others' promises (which do not need their main threads).
    """

    def __init__(self, state: RunState, strategy: Strategy, timeout: float = 60.0) -> None:
        self._state = state
        self._strategy = strategy
        self._timeout = timeout
        self._asked = ""
        self._reason = ""
        self._stop_at: int | None = None
        self._published = False
        self._error = ""
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._store: Store | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch; called by every rank at the same place, after the strategy has joined the processes."""
        if self._strategy.world_size == 1 or self._thread is not None:
            return
        token = self._strategy.broadcast(uuid.uuid4().hex)
        self._store = _own_store(f"fabricamp/stop/{token}", self._timeout)
        self._thread = threading.Thread(target=self._watch, name="fabricamp-watchdog", daemon=True)
        self._thread.start()

    def request(self, reason: str) -> None:
        """Asks all ranks to stop; from any rank, any thread or a signal handler: it only sets plain attributes."""
        if self._asked:
            return
        self._asked = reason
        if self._strategy.world_size == 1:
            self._reason = reason
            self._state.hold_at = 0

    def hold(self) -> None:
        """Called by the main thread at ``state.hold_at``: learns where all stop, and stops if that is here."""
        if self._strategy.world_size == 1:
            self._stop_at = self._state.batches_done
        elif not self._settled.wait(self._timeout) or self._stop_at is None:
            raise DistributedError(self._who_is_missing())
        assert self._stop_at is not None
        if self._state.batches_done < self._stop_at:
            self._state.hold_at = self._stop_at
            return
        self._state.hold_at = sys.maxsize
        self._state.stop(self._reason)

    def close(self) -> None:
        """Ends the watch; waits for no other rank."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None
        self._state.hold_at = sys.maxsize

    def _watch(self) -> None:
        """The thread beside the main one."""
        try:
            while not self._closing.wait(_POLL_SECONDS) and not self._settled.is_set():
                self._look()
            if not self._published:
                self._publish(self._state.batches_done)
        except RuntimeError as error:
            # The store went with the rank that owns it.  A run that ends does not need it; who holds must learn of it.
            self._error = str(error)
            self._settled.set()

    def _look(self) -> None:
        """One look into the store: publishes this rank's request, answers anyone's, reads the answers."""
        assert self._store is not None
        if not self._published:
            if self._asked:
                self._store.compare_set(_REQUEST, "", self._asked)
            if not self._store.check([_REQUEST]):
                return
            self._reason = self._store.get(_REQUEST).decode()
            self._publish(self._promise())
        keys = [_promise_key(rank) for rank in range(self._strategy.world_size)]
        if self._store.check(keys):
            self._stop_at = max(int(value) for value in self._store.multi_get(keys))
            self._settled.set()

    def _promise(self) -> int:
        """Sets ``hold_at`` where the main thread cannot have passed it, and returns it.

        The main thread counts, then compares: a count still below the promise once that is set will be compared with it.
        """
        while True:
            promise = self._state.batches_done + _AHEAD
            self._state.hold_at = promise
            if self._state.batches_done < promise:
                return promise

    def _publish(self, position: int) -> None:
        assert self._store is not None
        self._published = True
        self._store.set(_promise_key(self._strategy.rank), str(position))

    def _who_is_missing(self) -> str:
        why = f"; the store of the process group is gone ({self._error.splitlines()[0]})" if self._error else ""
        ranks = range(self._strategy.world_size)
        if self._store is not None and not self._error:
            with contextlib.suppress(RuntimeError):
                missing = [str(rank) for rank in ranks if not self._store.check([_promise_key(rank)])]
                why = f": no answer from rank {', '.join(missing)} within {self._timeout:g} s"
        return (
            f"rank {self._strategy.rank} was asked to stop ({self._reason}) and waited at micro-batch "
            f"{self._state.batches_done} for the ranks to agree where{why}; see what ended or blocks them"
        )


def _promise_key(rank: int) -> str:
    return f"promise/{rank}"


def _own_store(prefix: str, timeout: float) -> Store:
    """A connection of its own to the process group's store: the main thread may wait long on the shared one."""
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import PrefixStore

    store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(prefix, store)


@contextlib.contextmanager
def interrupts(agreement: StopAgreement) -> Iterator[None]:
    """Within it the first Ctrl-C asks to stop, the second raises KeyboardInterrupt at once.

    Does nothing outside the main thread, or where SIGINT is ignored (a job in the background of a shell).  Enter it
    before data loaders start their workers: those that are forked then outlive a Ctrl-C, which a terminal sends to them.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    owner = os.getpid()
    seen = 0

    def on_interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if os.getpid() != owner:
            return
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        agreement.request("interrupted")

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
