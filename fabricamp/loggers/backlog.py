"""What waits for a file: a thread of its own appends it, so that no step waits for a disk that is slow, full or gone."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from fabricamp.loggers.outbox import Call, Outbox, settle
from fabricamp.loggers.trouble import Trouble

Place = TypeVar("Place")
Answer = TypeVar("Answer")


class Record(NamedTuple):
    """What stands for one step in a file, and how much of what may wait in memory it is."""

    step: int
    content: Any
    weight: int = 1


class _Loss(NamedTuple):
    reason: str
    rows: int
    steps: Sequence[int]


class Backlog(Generic[Place]):
    """Records on their way to a file, which a thread appends them to when it is asked to.

    ``look`` is called by the thread and returns the place where the file ends; ``append``, with what all waiting records hold,
    the place behind them.  After an ``OSError`` they wait for the next attempt; no more wait than weigh ``most``, the newest.  Any
    other error is a mistake: the records are dropped, and :meth:`report` raises it.  All that touches the files goes through the
    thread, in order.
    """

    SECONDS = 30.0
    """How long the end of a run, and who asks for what is in a file, wait for the disk."""

    def __init__(
        self,
        look: Callable[[], Place],
        append: Callable[[list[Any]], Place],
        most: int,
        folder: Callable[[], object],
        records: Iterable[Record] = (),
    ) -> None:
        self.process = os.getpid()
        self._look, self._append, self._most, self._folder = look, append, most, folder
        self._lock = threading.Lock()
        self._touching = threading.Lock()  # a thread that was given up may still be at it
        self._generation = 0
        self._clear()
        for record in records:
            self.add(record)

    def _clear(self) -> None:
        self._generation += 1
        self._outbox: Outbox[Call] = Outbox(partial(self._send, self._generation), most_at_once=1)
        self._place: Place | None = None
        self._records: list[Record] = []
        self._weight = self._asked = self._busy = 0  # of the records, how many are to be written, and are being written
        self._requested = False
        self._losses: list[_Loss] = []

    # -- of the thread that trains -----------------------------------------------------------------------------------------------

    def add(self, record: Record) -> int:
        """Keeps it in memory, and returns how many wait there that nobody writes."""
        with self._lock:
            self._records.append(record)
            self._weight += record.weight
            if self._weight > self._most:
                self._drop_oldest()
            return len(self._records) - self._busy

    def write_soon(self) -> None:
        """Lets the thread append what waits, and returns at once."""
        with self._lock:
            self._asked = len(self._records)
            if self._requested or not self._records:
                return
            self._requested = True
        self.do(self._write)

    def do(self, call: Callable[[], object]) -> None:
        """Lets the thread call it."""
        self._outbox.put(Call(lambda _: call()))

    def ask(self, call: Callable[[], Answer], *, patient: bool = False) -> Answer:
        """Returns the answer of ``call`` in the thread, or raises its error; :meth:`wait` says how long it waits."""
        answer: Future[Answer] = Future()
        self.do(partial(settle, answer, call))
        self.wait(patient=patient)
        return answer.result(0)

    def find(self, look: Callable[[], Place], *, patient: bool = False) -> None:
        """Takes the answer of ``look`` in the thread for the place where the file ends."""
        self.ask(lambda: self._publish(look()), patient=patient)

    def state(self) -> tuple[Place, list[Any]]:
        """Where the file ends, and what is still to stand behind that."""
        if self._place is None:
            try:
                self.find(self._look)
            except TimeoutError:
                if self._place is None:
                    raise
        with self._lock:
            assert self._place is not None
            return self._place, [one.content for one in self._records]

    def wait(self, *, patient: bool = False) -> None:
        """Returns once the thread has done what it was given so far; ``TimeoutError`` after 30 seconds, if not ``patient``."""
        if not self._outbox.wait(None if patient else self.SECONDS):
            raise TimeoutError(
                errno.ETIMEDOUT, f"the disk has not answered within {self.SECONDS:g} s", str(self._folder())
            )

    def report(self, trouble: Trouble) -> None:
        """Tells ``trouble`` what failed since the last call, and raises what was a mistake."""
        with self._lock:
            losses, self._losses = self._losses, []
        for reason, rows, steps in losses:
            if reason:
                trouble.tell(reason)
            trouble.lose(rows, steps)
        for failure in self._outbox.failures():
            if failure.error is not None and not isinstance(failure.error, OSError):
                raise failure.error
            trouble.tell(failure.reason)

    def close(self, trouble: Trouble) -> None:
        """Writes what waits, for which it takes no more than 30 seconds; the rest is lost.  It may be used again."""
        self.write_soon()
        self._outbox.close(self.SECONDS)
        with self._lock:
            left = self._records
        try:
            self.report(trouble)
        finally:
            trouble.lose(len(left), [one.step for one in left])
            with self._lock:
                self._clear()

    def left_behind(self) -> list[Record]:
        """What another process has to write: this one, which began it or which it was forked of, was not asked to."""
        return self._records[self._asked :]

    # -- of both -----------------------------------------------------------------------------------------------------------------

    def lose(self, reason: str, rows: int, steps: Sequence[int]) -> None:
        """Notes that so many rows, of these steps, are gone from the disk."""
        with self._lock:
            self._losses.append(_Loss(reason, rows, steps))

    def _publish(self, place: Place) -> None:
        with self._lock:
            self._place = place

    def _drop_oldest(self) -> None:
        dropped = []
        while self._weight > self._most and len(self._records) > self._busy + 1:
            one = self._records.pop(self._busy)
            self._weight -= one.weight
            dropped.append(one.step)
        self._asked = max(self._asked - len(dropped), 0)
        if dropped:
            # Where it does answer, it is told what.
            reason = f"{self._folder()}: the disk does not answer" if self._busy else ""
            self._losses.append(_Loss(reason, len(dropped), dropped))

    # -- of the thread -----------------------------------------------------------------------------------------------------------

    def _send(self, generation: int, calls: Sequence[Call]) -> None:
        with self._touching:
            for one in calls if generation == self._generation else ():
                one.call(None)

    def _write(self) -> None:
        with self._lock:
            generation, self._requested = self._generation, False
            records = list(self._records)
            self._busy = len(records)
        place, gone = None, len(records)
        try:
            self._publish(self._look())  # a checkpoint asks for it, also while the disk hangs
            place = self._append([one.content for one in records]) if records else None
        except OSError:
            gone = 0
            raise
        finally:
            with self._lock:
                if generation == self._generation:
                    self._settle(gone, place)

    def _settle(self, gone: int, place: Place | None) -> None:
        self._busy = 0
        self._weight -= sum(one.weight for one in self._records[:gone])
        del self._records[:gone]
        self._asked = max(self._asked - gone, 0)
        if place is not None:
            self._place = place
