"""What waits for a server: it is sent by a thread of its own, so that no step waits for an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from fabricamp.loggers.trouble import Trouble

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST_WAITING = 10_000
_MOST_AT_ONCE = 20


class Call(NamedTuple):
    """A call of what a logger writes to, and the step whose values it brings, where it brings some."""

    call: Callable[[Any], object]
    step: int | None = None


class Failure(NamedTuple):
    """What was not sent, and why."""

    reason: str
    items: Sequence[object]


class Outbox(Generic[Item]):
    """Sends what it was given, in order, so many of them at once; what ``send`` raises on is noted and not sent again.

    Of what waits, no more than 10,000 are kept: the oldest are lost.  After a fork the child has what waits too: give it a
    new one.
    """

    def __init__(self, send: Callable[[Sequence[Item]], None], most_at_once: int = _MOST_AT_ONCE) -> None:
        self._send = send
        self._most_at_once = most_at_once
        self._waiting: list[Item] = []
        self._sending: list[Item] = []
        self._failures: list[Failure] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, item: Item) -> None:
        """Gives it ``item``, and returns at once."""
        with self._changed:
            self._waiting.append(item)
            if len(self._waiting) > _MOST_WAITING:
                self._failures.append(Failure("the server is too slow", [self._waiting.pop(0)]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fabricamp-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether everything is sent, or noted as failed, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._sending, seconds)

    def failures(self) -> list[Failure]:
        """Returns what failed since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def report(self, trouble: Trouble) -> None:
        """Tells ``trouble`` what failed since the last call; of calls, the steps whose values are lost by it."""
        for reason, items in self.failures():
            trouble.tell(reason)
            steps = [one.step for one in items if isinstance(one, Call) and one.step is not None]
            trouble.lose(len(steps), steps)

    def close(self, seconds: float) -> bool:
        """Waits so long, then gives up what is left; returns whether nothing was."""
        answered = self.wait(seconds)
        with self._changed:
            if left := [*self._sending, *self._waiting]:
                self._failures.append(Failure(f"no answer within {seconds:g} s", left))
            self._waiting, self._sending, self._closed = [], [], True
            self._changed.notify_all()
        return answered

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                items = self._sending = self._waiting[: self._most_at_once]
                del self._waiting[: self._most_at_once]
            reason = ""
            try:
                self._send(items)
            except Exception as error:  # noqa: BLE001 - told by the thread that trains; it costs values, not the run
                reason = str(error) or type(error).__name__
            with self._changed:
                if reason and not self._closed:
                    self._failures.append(Failure(reason, items))
                self._sending = []
                self._changed.notify_all()


def in_time(call: Callable[[], Answer], seconds: float, whom: str) -> Answer:
    """Returns the answer of ``call``, or raises its error; after so many seconds :class:`TimeoutError`, and it goes on alone."""
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="fabricamp-question", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"{whom} has not answered within {seconds:g} s")
    return answers[0]
