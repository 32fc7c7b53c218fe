"""Which files are a ModelCheckpoint's own: each names the attempt that wrote it, and a run knows the attempts that led to it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fabricamp.callbacks._rotation import Kept
from fabricamp.checkpoint import how_far, read_header
from fabricamp.errors import CheckpointError

WRITTEN_BY = "written_by"
"""The key of a checkpoint that names the attempt of the ModelCheckpoint that wrote it."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The attempts of one ModelCheckpoint, one a ``fit``, that led to where it is.

    ``earlier`` holds each with the last of its steps that this run went on from: what it wrote behind that is another branch's.
    """

    attempt: str = ""
    earlier: dict[str, int] = field(default_factory=dict)

    def go_on(self, step: int) -> Lineage:
        """A new attempt that goes on from ``step`` of this one."""
        earlier = {**self.earlier, self.attempt: step} if self.attempt else self.earlier
        return Lineage(secrets.token_hex(8), earlier)

    def order(self, header: dict[str, Any]) -> tuple[int, ...]:
        """Sorts the files of this lineage, the newest last; empty for what is of none of its attempts."""
        attempt, far = header.get(WRITTEN_BY), how_far(header)
        if not isinstance(attempt, str) or far[0] > self.earlier.get(attempt, -1):
            return ()
        return (*far, list(self.earlier).index(attempt))

    def only(self, attempts: Iterable[Any]) -> Lineage:
        """Without the earlier attempts of which nothing is left."""
        left = set(attempts)
        return Lineage(self.attempt, {name: step for name, step in self.earlier.items() if name in left})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"attempt": self.attempt, "earlier_attempts": dict(self.earlier)}

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Lineage:
        """What :meth:`state_dict` gave; nothing where a version without it, or Lightning, wrote the state."""
        earlier = {str(name): int(step) for name, step in state.get("earlier_attempts", {}).items()}
        return Lineage(str(state.get("attempt", "")), earlier)


def take_stock(
    kept: Kept, lineage: Lineage, files: Iterable[str], may_follow: Callable[[str], bool]
) -> tuple[Kept, frozenset[str], Lineage]:
    """Returns what a resumed callback goes on with, the names in it that are not its own files, and its lineage.

    Of several callbacks only the one that wrote the checkpoint is up to date in it.  Each one's own newest file tells its own
    files; so none is forgotten, and what a checkpoint names is never removed for that alone.
    """
    own: dict[str, tuple[int, ...]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for place in files:
        try:
            header = read_header(place)
        except CheckpointError:
            continue  # damaged: nothing tells whose it is
        if order := lineage.order(header):
            own[place], headers[place] = order, header
    if own:
        newest = max(own, key=lambda place: own[place])
        kept = _told_by(headers[newest], kept)
    kept = kept.without({name for name in kept.all() if not may_follow(name)})
    lineage = lineage.only(header[WRITTEN_BY] for header in headers.values())
    return kept, frozenset(kept.all() - own.keys()), lineage


def _told_by(header: dict[str, Any], kept: Kept) -> Kept:
    """The state that a file holds of the callback that wrote it; ``kept`` where it holds none."""
    states = header.get("callbacks")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and state.get("attempt") == header[WRITTEN_BY]:
            try:
                return Kept.from_state_dict(state)
            except (AttributeError, KeyError, TypeError, ValueError):
                break
    return kept
