"""Finds a ModelCheckpoint's own files: each file names the attempt that wrote it, and a run knows its previous attempts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fabricamp.callbacks._rotation import Kept
from fabricamp.checkpoint import how_far, read_header
from fabricamp.errors import CheckpointError

WRITTEN_BY = "written_by"
"""The checkpoint key with the id of the ModelCheckpoint attempt that wrote the file."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The attempts (one per ``fit``) of one ModelCheckpoint that led to the current run.

    ``earlier`` maps each previous attempt to the step from which the next one resumed.  Files that an attempt wrote after that
    step belong to another branch.
    """

    attempt: str = ""
    earlier: dict[str, int] = field(default_factory=dict)

    def go_on(self, step: int) -> Lineage:
        """Returns a new attempt that resumes from ``step`` of this one."""
        earlier = {**self.earlier, self.attempt: step} if self.attempt else self.earlier
        return Lineage(secrets.token_hex(8), earlier)

    def order(self, header: dict[str, Any]) -> tuple[int, ...]:
        """Returns a sort key for files of this lineage, newest last; an empty key for a file of no attempt in it."""
        attempt, far = header.get(WRITTEN_BY), how_far(header)
        if not isinstance(attempt, str) or far[0] > self.earlier.get(attempt, -1):
            return ()
        return (*far, list(self.earlier).index(attempt))

    def only(self, attempts: Iterable[Any]) -> Lineage:
        """Returns this lineage with only those earlier attempts that are in ``attempts`` (they still have files)."""
        left = set(attempts)
        return Lineage(self.attempt, {name: step for name, step in self.earlier.items() if name in left})

    def state_dict(self) -> dict[str, Any]:
        """Returns the lineage as plain values, for a checkpoint."""
        return {"attempt": self.attempt, "earlier_attempts": dict(self.earlier)}

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Lineage:
        """Restores :meth:`state_dict`; empty if the state is Lightning's or from a version without a lineage."""
        earlier = {str(name): int(step) for name, step in state.get("earlier_attempts", {}).items()}
        return Lineage(str(state.get("attempt", "")), earlier)


def take_stock(
    kept: Kept, lineage: Lineage, files: Iterable[str], may_follow: Callable[[str], bool]
) -> tuple[Kept, frozenset[str], Lineage]:
    """Returns (files a resumed callback continues with, names among them that it did not write, its lineage).

    A checkpoint is up to date only for the ModelCheckpoint that wrote it.  So each callback reads the list of its files from its
    own newest file, and forgets none.  A file is never removed only because a checkpoint names it.
    """
    own: dict[str, tuple[int, ...]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for place in files:
        try:
            header = read_header(place)
        except CheckpointError:
            continue  # damaged: its writer is unknown
        if order := lineage.order(header):
            own[place], headers[place] = order, header
    if own:
        newest = max(own, key=lambda place: own[place])
        kept = _told_by(headers[newest], kept)
    kept = kept.without({name for name in kept.all() if not may_follow(name)})
    lineage = lineage.only(header[WRITTEN_BY] for header in headers.values())
    return kept, frozenset(kept.all() - own.keys()), lineage


def _told_by(header: dict[str, Any], kept: Kept) -> Kept:
    """Returns the state of the callback that wrote the file with ``header``; ``kept`` if the header has no such state."""
    states = header.get("callbacks")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and state.get("attempt") == header[WRITTEN_BY]:
            try:
                return Kept.from_state_dict(state)
            except (AttributeError, KeyError, TypeError, ValueError):
                break
    return kept
