"""Queues of what loggers write: a separate thread does the writing, so no step waits for a server or a disk.

:class:`WriteQueue` sends items in order, and reports those that failed.  :class:`RecordQueue` uses one to append records to a file;
it keeps the records while the disk is slow, full or gone.  :func:`in_time` asks a server one question, with a limit of time.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from fabricamp._utils.threads import start_thread
from fabricamp.loggers.logger_errors import LoggerErrors, reason_of

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Position = TypeVar("Position")
Content = TypeVar("Content")
Target = TypeVar("Target")

_MOST_WAITING = 10_000
_MOST_AT_ONCE = 20
_EXIT_SECONDS = 30.0


class Call(NamedTuple, Generic[Target]):
    """A call on the object that a logger writes to, its ``Target``; ``step`` is the step of its values, if it has values."""

    call: Callable[[Target], object]
    step: int | None = None


class Failure(NamedTuple):
    """The items that were not sent, and the reason; with the error, if there was one."""

    reason: str
    items: Sequence[object]
    error: Exception | None = None


class WriteQueue(Generic[Item]):
    """Sends items in order, up to ``most_at_once`` per call of ``send``; if ``send`` raises, its items failed for good.

    At most 10,000 items wait; the oldest are lost.  After a fork the child begins with an empty queue.  A process that ends without
    :meth:`close` waits for the queue, up to 30 seconds.
    """

    def __init__(
        self, send: Callable[[Sequence[Item]], None], most_at_once: int = _MOST_AT_ONCE, *, stays: bool = True
    ) -> None:
        self._send = send
        self._most_at_once = most_at_once
        self._stays = stays  # whether the thread waits for further items
        self._clear()

    def _clear(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: list[Item] = []
        self._sending: list[Item] = []
        self._num_put = 0
        self._num_sent_before = 0  # number of items that were put before those in _sending
        self._failures: list[Failure] = []
        self.failing = False
        """Whether the items that were sent last failed."""
        self._timed_out = False  # whether the last wait was in vain, and nothing was sent since
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, which the first :meth:`put` does else; raises :class:`NoThreadError` if the system starts none.

        It stays until :meth:`close`.  With ``stays=False`` and without this call, it ends when it has sent all items.
        """
        with self._own_condition():
            self._stays = True
            self._have_thread()

    def _have_thread(self) -> None:
        if self._thread is None:
            self._thread = start_thread(
                self._run, name="fabricamp-write-queue", what="a logger", otherwise="give logger=False"
            )
            atexit.register(self._at_exit)

    def put(self, item: Item) -> None:
        """Queues ``item``; returns at once."""
        with self._own_condition():
            self._have_thread()
            self._waiting.append(item)
            self._num_put += 1
            if len(self._waiting) > _MOST_WAITING:
                self._failures.append(Failure("the server is too slow", [self._waiting.pop(0)]))
            self._changed.notify_all()

    def _run(self) -> None:
        """Sends the items, in the queue's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed or not self._stays)
                if self._closed:
                    return
                if not self._waiting:  # outside of a run nobody may close the queue
                    self._thread = None
                    atexit.unregister(self._at_exit)
                    return
                self._num_sent_before = self._num_put - len(self._waiting)
                self._sending = self._waiting[: self._most_at_once]
                items = self._sending
                del self._waiting[: self._most_at_once]
            failed: Exception | None = None
            try:
                self._send(items)
            except Exception as error:  # noqa: BLE001 - reported by the training thread; costs values, not the run
                failed = error
            with self._changed:
                self.failing = failed is not None
                # A queue that was closed meanwhile has reported these items already.
                if failed is not None and not self._closed:
                    self._failures.append(Failure(_reason(failed), items, failed))
                self._sending = []
                self._timed_out = False
                self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether all items so far were sent, or have failed, within ``seconds``.

        After a wait in vain, further calls with a limit return at once until something was sent.
        """
        with self._own_condition():
            num_put = self._num_put
            if self._timed_out and seconds is not None:
                return self._num_done() >= num_put
            answered = self._changed.wait_for(lambda: self._num_done() >= num_put, seconds)
            self._timed_out = not answered
            ending = None if self._stays or self._waiting else self._thread
        if answered:
            _see_end(ending)
        return answered

    def wait_unless_failing(self) -> bool:
        """Waits until all items so far were sent, but no longer once items fail, until some are sent again.

        For a server, whose requests may fail one after the other, each after a time.  Returns whether nothing fails.
        """
        with self._own_condition():
            num_put = self._num_put
            self._changed.wait_for(lambda: self.failing or self._num_done() >= num_put)
            return not self.failing

    def _num_done(self) -> int:
        """Returns the number of items put before the oldest one that is waiting or being sent."""
        return self._num_sent_before if self._sending else self._num_put - len(self._waiting)

    def failures(self) -> list[Failure]:
        """Returns the failures since the last call."""
        with self._own_condition():
            failures = self._failures
            self._failures = []
        return failures

    def report(self, errors: LoggerErrors) -> None:
        """Reports the failures since the last call to ``errors``, with the steps whose values are lost."""
        for reason, items, _ in self.failures():
            errors.tell(reason)
            steps = [item.step for item in items if isinstance(item, Call) and item.step is not None]
            errors.lose(len(steps), steps)

    def close(self, seconds: float) -> bool:
        """Waits up to ``seconds``, then drops the remaining items; returns whether none remained."""
        answered = self.wait(seconds)
        atexit.unregister(self._at_exit)
        with self._changed:
            unsent = [*self._sending, *self._waiting]
            if unsent:
                self._failures.append(Failure(f"no answer within {seconds:g} s", unsent))
            self._waiting = []
            self._sending = []
            self._closed = True
            self._changed.notify_all()
        if answered:
            _see_end(self._thread)
        return answered

    def _at_exit(self) -> None:
        self.wait(_EXIT_SECONDS)

    def _own_condition(self) -> threading.Condition:
        if self._process != os.getpid():  # forked: the thread does not exist here, and the items are the parent's
            self._clear()
        return self._changed


def _see_end(thread: threading.Thread | None) -> None:
    """Returns once a thread that has nothing left to do has ended: no thread of a logger outlives its run."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)


def _reason(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error) or type(error).__name__


class Record(NamedTuple, Generic[Content]):
    """The content of one step in a file; ``weight`` counts towards the limit of records that wait in memory."""

    step: int
    content: Content
    weight: int = 1


class _Loss(NamedTuple):
    reason: str
    rows: int
    steps: Sequence[int]


class RecordQueue(Generic[Content, Position]):
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
        look: Callable[[], Position],
        append: Callable[[list[Content]], Position],
        most: int,
        folder: Callable[[], object],
        records: Iterable[Record[Content]] = (),
    ) -> None:
        self.process = os.getpid()
        self._look = look
        self._append = append
        self._most = most
        self._folder = folder
        self._lock = threading.Lock()  # guards what _clear sets
        self._file_lock = threading.Lock()  # an abandoned thread may still use the files
        self._generation = 0  # grows with each close; calls of an earlier one are dropped
        self._clear()
        for record in records:
            self.add(record)

    def _clear(self) -> None:
        self._generation += 1
        # One call at a time: if several were sent together, a failed call would fail the later ones too.
        self._calls: WriteQueue[Call[None]] = WriteQueue(
            partial(self._send, self._generation), most_at_once=1, stays=False
        )
        self._position: Position | None = None
        # Oldest first; the first _num_requested are to be written, the first _num_writing are being written.
        self._records: list[Record[Content]] = []
        self._num_requested = 0
        self._num_writing = 0
        self._weight = 0  # of all records
        self._write_is_queued = False
        self._losses: list[_Loss] = []
        self._notices: list[str] = []

    # -- called by the training thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which the first request does else; raises :class:`NoThreadError` if the system starts none."""
        self._calls.start()

    def add(self, record: Record[Content]) -> int:
        """Keeps ``record`` in memory; returns the number of waiting records that are not being written."""
        with self._lock:
            self._records.append(record)
            self._weight += record.weight
            if self._weight > self._most:
                self._drop_oldest()
            return len(self._records) - self._num_writing

    def _drop_oldest(self) -> None:
        dropped = []
        while self._weight > self._most and len(self._records) > self._num_writing + 1:
            record = self._records.pop(self._num_writing)
            self._weight -= record.weight
            dropped.append(record.step)
        self._num_requested = max(self._num_requested - len(dropped), 0)
        if dropped:
            # If the disk does answer, its own error is reported.
            reason = f"{self._folder()}: the disk does not answer" if self._num_writing else ""
            self._losses.append(_Loss(reason, len(dropped), dropped))

    def write_soon(self) -> None:
        """Asks the thread to append the waiting records; returns at once."""
        with self._lock:
            self._num_requested = len(self._records)
            if self._write_is_queued or not self._records:
                return
            self._write_is_queued = True
        self.call_soon(self._write)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Asks the thread to call ``call``; returns at once."""
        self._calls.put(Call(lambda _: call()))

    def call_and_wait(self, call: Callable[[], Answer], *, patient: bool = False) -> Answer:
        """Returns the result of ``call`` in the thread, or raises its error; waits like :meth:`wait`."""
        answer: Future[Answer] = Future()
        self.call_soon(partial(_resolve, answer, call))
        self.wait(patient=patient)
        return answer.result(0)

    def update_position(self, look: Callable[[], Position], *, patient: bool = False) -> None:
        """Calls ``look`` in the thread and stores its result as the end position of the file."""
        self.call_and_wait(lambda: self._store(look()), patient=patient)

    def state(self) -> tuple[Position, list[Content]]:
        """Returns the end position of the file, and the contents that are still to be appended."""
        if self._position is None:
            try:
                self.update_position(self._look)
            except TimeoutError:
                # The thread may be in the middle of a write, which stores the position before it appends.
                if self._position is None:
                    raise
        with self._lock:
            assert self._position is not None
            return self._position, [record.content for record in self._records]

    def waiting(self) -> list[Content]:
        """Returns the contents that are still to be appended; asks the disk for nothing."""
        with self._lock:
            return [record.content for record in self._records]

    def wait(self, *, patient: bool = False) -> None:
        """Returns once the thread has done all requests so far; raises ``TimeoutError`` after 30 seconds unless ``patient``."""
        if not self._calls.wait(None if patient else self.SECONDS):
            raise TimeoutError(
                errno.ETIMEDOUT, f"the disk has not answered within {self.SECONDS:g} s", str(self._folder())
            )

    def report(self, errors: LoggerErrors) -> None:
        """Reports the failures since the last call to ``errors``; raises an error that is no ``OSError``."""
        with self._lock:
            losses = self._losses
            self._losses = []
            notices = self._notices
            self._notices = []
        for notice in notices:
            errors.say(notice)
        for reason, rows, steps in losses:
            if reason:
                errors.tell(reason)
            errors.lose(rows, steps)
        for failure in self._calls.failures():
            if failure.error is not None and not isinstance(failure.error, OSError):
                raise failure.error
            errors.tell(failure.reason)

    def close(self, errors: LoggerErrors) -> None:
        """Writes the waiting records, for up to 30 seconds; the rest is lost.  The queue may be used again."""
        self.write_soon()
        self._calls.close(self.SECONDS)
        with self._lock:
            unwritten = self._records
        try:
            self.report(errors)
        finally:
            errors.lose(len(unwritten), [record.step for record in unwritten])
            with self._lock:
                self._clear()

    def unrequested(self) -> list[Record[Content]]:
        """Returns the records that the thread was not asked to write; a forked or unpickled copy has to write them."""
        return self._records[self._num_requested :]

    # -- called by the writing thread --------------------------------------------------------------------------------------------

    def _send(self, generation: int, calls: Sequence[Call[None]]) -> None:
        with self._file_lock:
            if generation == self._generation:
                for call in calls:
                    call.call(None)

    def _write(self) -> None:
        with self._lock:
            generation = self._generation
            self._write_is_queued = False
            records = list(self._records)
            self._num_writing = len(records)
        num_gone = len(records)
        position = None
        try:
            self._store(self._look())  # a checkpoint reads this position, even while the disk hangs
            if records:
                position = self._append([record.content for record in records])
        except OSError:
            num_gone = 0  # the records wait for the next attempt
            raise
        finally:
            with self._lock:
                if generation == self._generation:  # else the queue was closed, and has counted them as lost
                    self._num_writing = 0
                    self._weight -= sum(record.weight for record in self._records[:num_gone])
                    del self._records[:num_gone]
                    self._num_requested = max(self._num_requested - num_gone, 0)
                    if position is not None:
                        self._position = position

    def _store(self, position: Position) -> None:
        with self._lock:
            self._position = position

    def lose(self, reason: str, rows: int, steps: Sequence[int]) -> None:
        """Records that ``rows`` rows of these steps are lost from the disk."""
        with self._lock:
            self._losses.append(_Loss(reason, rows, steps))

    def say(self, notice: str) -> None:
        """Records a notice for :meth:`report`."""
        with self._lock:
            self._notices.append(notice)


def in_time(call: Callable[[], Answer], seconds: float, whom: str) -> Answer:
    """Returns the result of ``call``, or raises its error; after ``seconds`` raises ``TimeoutError``, and the call runs on."""
    answer: Future[Answer] = Future()
    start_thread(
        _resolve, answer, call, name="fabricamp-question", what=f"a question to {whom}", otherwise="give logger=False"
    )
    if not wait([answer], seconds).done:
        raise TimeoutError(f"{whom} has not answered within {seconds:g} s")
    return answer.result()


def _resolve(answer: Future[Answer], call: Callable[[], Answer]) -> None:
    """Calls ``call``, and stores its result or error in ``answer``."""
    try:
        answer.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
        answer.set_exception(error)
