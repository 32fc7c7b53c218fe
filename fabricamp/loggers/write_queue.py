"""Queues items for a server or a disk: a separate thread sends them, so no step waits for an answer."""

from __future__ import annotations

import atexit
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from fabricamp.loggers.logger_errors import Trouble, reason_of

# ~~~ from loggers.outbox: Queues items for a server or a disk: a separate thread sends them, so no step waits for an answer.


Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST_WAITING = 10_000
_MOST_AT_ONCE = 20
_EXIT_SECONDS = 30.0


class Call(NamedTuple):
    """A call on the object that a logger writes to; ``step`` is the step of its values, if it has values."""

    call: Callable[[Any], object]
    step: int | None = None


class Failure(NamedTuple):
    """The items that were not sent, and the reason; with the error, if there was one."""

    reason: str
    items: Sequence[object]
    error: Exception | None = None


class Outbox(Generic[Item]):
    """Sends items in order, up to ``most_at_once`` per call of ``send``; if ``send`` raises, its items failed for good.

    At most 10,000 items wait; the oldest are lost.  After a fork the child begins with an empty queue.  A process that ends without
    :meth:`close` waits for the queue, up to 30 seconds.
    """

    def __init__(self, send: Callable[[Sequence[Item]], None], most_at_once: int = _MOST_AT_ONCE) -> None:
        self._send = send
        self._most_at_once = most_at_once
        self._clear()

    def _clear(self) -> None:
        self._process = os.getpid()
        self._waiting: list[Item] = []
        self._sending: list[Item] = []
        self._given = self._sending_from = 0
        self._failures: list[Failure] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._in_vain = False

    def put(self, item: Item) -> None:
        """Queues ``item``; returns at once."""
        with self._here():
            self._waiting.append(item)
            self._given += 1
            if len(self._waiting) > _MOST_WAITING:
                self._failures.append(Failure("the server is too slow", [self._waiting.pop(0)]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fabricamp-outbox", daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether all items so far were sent, or have failed, within ``seconds``.

        After a wait in vain, further calls with a limit return at once until something was sent.
        """
        with self._here():
            given = self._given
            if self._in_vain and seconds is not None:
                return self._done() >= given
            answered = self._changed.wait_for(lambda: self._done() >= given, seconds)
            self._in_vain = not answered
        return answered

    def failures(self) -> list[Failure]:
        """Returns the failures since the last call."""
        with self._here():
            failures, self._failures = self._failures, []
        return failures

    def report(self, trouble: Trouble) -> None:
        """Reports the failures since the last call to ``trouble``, with the steps whose values are lost."""
        for reason, items, _ in self.failures():
            trouble.tell(reason)
            steps = [one.step for one in items if isinstance(one, Call) and one.step is not None]
            trouble.lose(len(steps), steps)

    def close(self, seconds: float) -> bool:
        """Waits up to ``seconds``, then drops the remaining items; returns whether none remained."""
        answered = self.wait(seconds)
        atexit.unregister(self._at_exit)
        with self._changed:
            if left := [*self._sending, *self._waiting]:
                self._failures.append(Failure(f"no answer within {seconds:g} s", left))
            self._waiting, self._sending, self._closed = [], [], True
            self._changed.notify_all()
        return answered

    def _here(self) -> threading.Condition:
        if self._process != os.getpid():  # forked: the thread does not exist here, and the items are the parent's
            self._clear()
        return self._changed

    def _done(self) -> int:
        """Returns the number of items given before the oldest one that is waiting or being sent."""
        return self._sending_from if self._sending else self._given - len(self._waiting)

    def _at_exit(self) -> None:
        self.wait(_EXIT_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._sending_from = self._given - len(self._waiting)
                items = self._sending = self._waiting[: self._most_at_once]
                del self._waiting[: self._most_at_once]
            failed: Exception | None = None
            try:
                self._send(items)
            except Exception as error:  # noqa: BLE001 - reported by the training thread; costs values, not the run
                failed = error
            with self._changed:
                if failed is not None and not self._closed:
                    self._failures.append(Failure(_reason(failed), items, failed))
                self._sending, self._in_vain = [], False
                self._changed.notify_all()


def _reason(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def in_time(call: Callable[[], Answer], seconds: float, whom: str) -> Answer:
    """Returns the result of ``call``, or raises its error; after ``seconds`` raises ``TimeoutError``, and the call runs on."""
    answer: Future[Answer] = Future()
    threading.Thread(target=settle, args=(answer, call), name="fabricamp-question", daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"{whom} has not answered within {seconds:g} s")
    return answer.result()


def settle(answer: Future[Answer], call: Callable[[], Answer]) -> None:
    """Calls ``call``, and stores its result or error in ``answer``."""
    try:
        answer.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
        answer.set_exception(error)


# ~~~ from loggers.backlog: Queues records for a file: a separate thread appends them, so no step waits for a disk that is slow, full or gone.


Place = TypeVar("Place")


class Record(NamedTuple):
    """The content of one step in a file; ``weight`` counts towards the limit of records that wait in memory."""

    step: int
    content: Any
    weight: int = 1


class _Loss(NamedTuple):
    reason: str
    rows: int
    steps: Sequence[int]


class Backlog(Generic[Place]):
    """A queue of records for a file; a thread appends them when asked to.

    The thread calls ``look``, which returns the end position of the file, and ``append``, which takes the contents of all waiting
    records and returns the new end position.  After an ``OSError`` the records wait for the next attempt; only the newest wait, up
    to a total weight of ``most``.  Any other error is a bug: the records are dropped, and :meth:`report` raises the error.  Only
    the thread touches the files, in order.
    """

    SECONDS = 30.0
    """How long the end of a run, and a read of the file's position, wait for the disk."""

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
        self._touching = threading.Lock()  # an abandoned thread may still use the files
        self._generation = 0
        self._clear()
        for record in records:
            self.add(record)

    def _clear(self) -> None:
        self._generation += 1
        self._outbox: Outbox[Call] = Outbox(partial(self._send, self._generation), most_at_once=1)
        self._place: Place | None = None
        self._records: list[Record] = []
        self._weight = self._asked = self._busy = 0  # numbers of records requested to be written, and being written
        self._requested = False
        self._losses: list[_Loss] = []

    # -- called by the training thread -------------------------------------------------------------------------------------------

    def add(self, record: Record) -> int:
        """Keeps ``record`` in memory; returns the number of waiting records that are not being written."""
        with self._lock:
            self._records.append(record)
            self._weight += record.weight
            if self._weight > self._most:
                self._drop_oldest()
            return len(self._records) - self._busy

    def write_soon(self) -> None:
        """Asks the thread to append the waiting records; returns at once."""
        with self._lock:
            self._asked = len(self._records)
            if self._requested or not self._records:
                return
            self._requested = True
        self.do(self._write)

    def do(self, call: Callable[[], object]) -> None:
        """Asks the thread to call ``call``; returns at once."""
        self._outbox.put(Call(lambda _: call()))

    def ask(self, call: Callable[[], Answer], *, patient: bool = False) -> Answer:
        """Returns the result of ``call`` in the thread, or raises its error; waits like :meth:`wait`."""
        answer: Future[Answer] = Future()
        self.do(partial(settle, answer, call))
        self.wait(patient=patient)
        return answer.result(0)

    def find(self, look: Callable[[], Place], *, patient: bool = False) -> None:
        """Calls ``look`` in the thread and stores its result as the end position of the file."""
        self.ask(lambda: self._publish(look()), patient=patient)

    def state(self) -> tuple[Place, list[Any]]:
        """Returns the end position of the file, and the contents that are still to be appended."""
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
        """Returns once the thread has done all requests so far; raises ``TimeoutError`` after 30 seconds unless ``patient``."""
        if not self._outbox.wait(None if patient else self.SECONDS):
            raise TimeoutError(
                errno.ETIMEDOUT, f"the disk has not answered within {self.SECONDS:g} s", str(self._folder())
            )

    def report(self, trouble: Trouble) -> None:
        """Reports the failures since the last call to ``trouble``; raises an error that is no ``OSError``."""
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
        """Writes the waiting records, for up to 30 seconds; the rest is lost.  The backlog may be used again."""
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
        """Returns the records that the thread was not asked to write; a forked or unpickled copy has to write them."""
        return self._records[self._asked :]

    # -- called by both threads --------------------------------------------------------------------------------------------------

    def lose(self, reason: str, rows: int, steps: Sequence[int]) -> None:
        """Records that ``rows`` rows of these steps are lost from the disk."""
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
            # If the disk does answer, its own error is reported.
            reason = f"{self._folder()}: the disk does not answer" if self._busy else ""
            self._losses.append(_Loss(reason, len(dropped), dropped))

    # -- called by the writing thread --------------------------------------------------------------------------------------------

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
            self._publish(self._look())  # a checkpoint reads this position, even while the disk hangs
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
