"""The agenda of a fit: after which micro-batch the host has to act next, and what it does there.

Most micro-batches need nothing from the host but their hooks.  So the loop makes one comparison after each of them::

    if last or state.batches_done >= agenda.next:
        end = agenda.run(last)

Each part that has to act (log, validate, stop) is an :class:`Entry`, which says its next :class:`Position`.  Validation and the
limits have the same positions on all ranks; an entry whose position may differ between ranks starts a collective only at a step
that all ranks know, or agrees through the store.  An entry is asked again when the run reaches its position, and all entries are
asked when an epoch begins or something has changed (:meth:`Agenda.look`).
"""

from __future__ import annotations

import enum
import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.state import RunState


class Position(NamedTuple):
    """A place in a run: a number of finished micro-batches, or of steps, whichever comes first; infinity for never."""

    batches: float = math.inf
    steps: float = math.inf


class PassEnd(enum.Enum):
    """Why an entry ends the pass over an epoch's batches."""

    CUT_SHORT = "a validation was cut short"
    STOPPED = "training ends here"


class Entry:
    """A part's work between two micro-batches.

    ``at`` is the number of micro-batches at which it acts next, as the agenda has last learned from :meth:`next`.
    """

    at: float = 0
    within_launch: ClassVar[bool] = False
    """Whether it acts between the steps of one launch too.

    Such an entry leaves weights alone; only its ``free_steps`` bounds a launch.
    """
    at_every_look: bool = False
    """Whether it acts whenever any entry does, unless an earlier one has ended the pass."""

    def next(self) -> Position:
        """Returns the next position at which it has to act; an earlier one is allowed."""
        return Position()

    def act(self, *, last: bool) -> PassEnd | None:
        """Does the work if it is due; ``last``: after an epoch's last batch.  Returns why the pass ends here, or None."""
        return None

    def free_steps(self, ahead: int) -> float:
        """Returns how many steps one launch may make, ``ahead`` steps from here, before the host has to act."""
        return math.inf


class Agenda:
    """The entries of a fit, and the next micro-batch at which one of them is due.

    ``next`` is read by the loop after each micro-batch.  Other threads, signal handlers and hooks change what entries read, and
    then call :meth:`look`.

    ``hold_at``: the micro-batch at which the main thread waits until the ranks have agreed where to stop (``watchdog/stop.py``);
    ``hold_evaluated``: the batch of the validation after it.  ``passed``: the last end of a step or epoch that this rank has gone
    past (``watchdog/requests.py``).  ``committed``: micro-batches launched already, or read for a launch; a run cannot stop before
    them.
    """

    __slots__ = (
        "_batches_to",
        "_changed",
        "_entries",
        "_state",
        "committed",
        "hold_at",
        "hold_evaluated",
        "next",
        "passed",
    )

    _state: RunState | None
    _entries: tuple[Entry, ...]
    _batches_to: Callable[[float], float]

    def __init__(self) -> None:
        self.next: float = 0
        self.hold_at = sys.maxsize
        self.hold_evaluated = sys.maxsize
        self.passed = -1.0
        self.committed = 0
        self._changed = False
        self.end()

    def __reduce__(self) -> tuple[type[Agenda], tuple[()], tuple[None, dict[str, Any]]]:
        """Copies and pickles have the positions, but no entries: these belong to a running fit."""
        names = ("hold_at", "hold_evaluated", "passed", "committed")
        return Agenda, (), (None, {name: getattr(self, name) for name in names})

    def add(self, *entries: Entry) -> None:
        """Adds entries after those that were added before: they act in this order."""
        self._entries = (*self._entries, *entries)

    def begin(self, state: RunState, batches_to: Callable[[float], float]) -> None:
        """Begins a fit, which counts in ``state``.

        ``batches_to`` returns the number of micro-batches, from the present one, to the end of the given number of steps.
        """
        self._state = state
        self._batches_to = batches_to

    def end(self) -> None:
        """Removes the entries at the end of a fit, and with them the references to its parts."""
        self._state = None
        self._entries = ()
        self._batches_to = float

    def look(self) -> None:
        """Lets all entries act and be asked again after this micro-batch.

        Called, in any thread or signal handler, after something changed that an entry reads.
        """
        # In this order: renew() writes `next` before it reads `_changed`, so it cannot undo a call of another thread.
        self._changed = True
        self.next = 0

    def run(self, last: bool) -> PassEnd | None:
        """Lets the entries act that are due, and all of them after an epoch's ``last`` batch.

        Returns why the pass over the epoch's batches ends here; None if it goes on.
        """
        assert self._state is not None
        done = self._state.batches_done
        in_launch = done < self.committed
        for entry in self._entries:
            if in_launch and not entry.within_launch:
                continue
            # An earlier entry may have changed what this one reads (a validation asks to stop), so _changed is read for each.
            if last or self._changed or entry.at_every_look or entry.at <= done:
                end = entry.act(last=last)
                if end is not None:
                    return end
        self.renew(every=False)
        return None

    def renew(self, *, every: bool = True) -> None:
        """Asks for the next positions: of ``every`` entry, or of those whose position has come; of all if something changed."""
        assert self._state is not None
        if self._changed:  # not cleared unread: another thread may call look() in between
            self._changed = False
            every = True
        done = self._state.batches_done
        following = math.inf
        for entry in self._entries:
            if every or entry.at <= done:
                entry.at = self._batch_of(entry.next(), done)
            following = min(following, entry.at)
        self.next = following
        if self._changed:  # meanwhile, by a signal handler or another thread
            self.next = 0

    def _batch_of(self, position: Position, done: int) -> float:
        """Returns the number of micro-batches at ``position``; ``done`` if its step has come already."""
        assert self._state is not None
        if position.steps == math.inf:
            return position.batches
        steps = position.steps - self._state.global_step
        if steps <= 0:
            return done
        return min(position.batches, done + self._batches_to(steps))

    def free_steps(self, ahead: int = 0) -> float:
        """Returns how many steps one launch may make, ``ahead`` steps from here, before the host has to act."""
        return min(entry.free_steps(ahead) for entry in self._entries)
