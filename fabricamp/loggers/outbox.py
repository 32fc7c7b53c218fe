"""Queues items for a server or a disk: a separate thread sends them, so no step waits for an answer."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, NamedTuple, TypeVar

from fabricamp.loggers.trouble import Trouble, reason_of

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
