"""What one save does to the files of a ModelCheckpoint: decided by rank 0, which sees the folder, and carried out by all."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabricamp.callbacks._rotation import Kept

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Plan", "Planner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One save, in this order: ``moves``, write ``target``, make ``last`` of it, remove, publish ``after``."""

    target: str = ""
    """What the Trainer writes; empty: nothing is saved."""
    last: str = ""
    """The second name of ``target`` that ``save_last`` wants."""
    moves: tuple[tuple[str, str], ...] = ()
    """Good files whose names the new ones take: they get another name first."""
    after: Kept = field(default_factory=Kept)
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans the saves into one folder."""

    folder: Path
    top_k: int
    mode: str
    versions: bool
    """Whether a taken name gets a version; else the file of that name is replaced."""
    link_last: bool
    join: str
    first_version: int
    protected: str = ""
    """The file that training was resumed from: it stays while this run lasts."""

    def plan(self, kept: Kept, path: str, last: str, score: float | None) -> Plan:
        """Plans to save at ``path`` (where ``score`` is good enough) and at ``last``, either of which may be empty."""
        kept = kept.without({file for file in kept.all() if not _exists(file)})
        moves: tuple[tuple[str, str], ...] = ()
        if path and (score is None or kept.ranks(score, self.top_k, self.mode)):
            staying = kept.files if self.top_k < 0 else kept.add("", score, self.top_k, self.mode).scores
            leaving = frozenset(kept.files).difference(staying)
            path = self._name(path, leaving)
            if path in leaving:
                aside = self._aside(path)
                moves, kept = ((path, aside),), kept.renamed(path, aside)
            after = kept.add(path, score, self.top_k, self.mode)
        else:
            path, after = "", kept
        if not last or (not path and self.link_last and kept.files):  # the link shows the newest file already
            return Plan(target=path, moves=moves, after=after, remove=self._removable(after.surplus(self.top_k)))
        return self._with_last(Plan(target=path, moves=moves, after=after), kept, last)

    def _with_last(self, plan: Plan, kept: Kept, last: str) -> Plan:
        """``plan`` with the file of ``save_last``, keeping the one that it replaces until the next time."""
        old = "" if kept.last in kept.files else kept.last  # an exception's file is a file like others
        last = self._name(last, {old})
        moves, spare = plan.moves, ""
        if old == last:
            spare = kept.spare if _same_file(kept.spare, old) else self._aside(old)
            spare = spare if _stands_alone(old, spare) else ""
            moves += ((old, spare),) if spare else ()
        elif old and not Path(old).is_symlink():
            spare = old
        after = replace(plan.after, last=last, spare=spare)
        dropped = {old, kept.spare} - {last, spare, ""}
        return Plan(
            target=plan.target or last,
            last=last,
            moves=moves,
            after=after,
            remove=self._removable((*after.surplus(self.top_k), *sorted(dropped))),
        )

    def _name(self, path: str, own: Collection[str]) -> str:
        """``path``, with a version where a file has that name that is not one of ``own``."""
        return self._versioned(path, own) if self.versions else path

    def _aside(self, path: str) -> str:
        """A free name for the good file whose name is about to be taken, or the one that a killed run gave it already."""
        taken = Path(path)
        aside = str(taken.with_name(f"{taken.stem}{self.join}previous{taken.suffix}"))
        return self._versioned(aside, {aside} if _same_file(aside, path) else ())

    def _versioned(self, path: str, own: Collection[str]) -> str:
        wanted, version = Path(path), self.first_version
        name = path
        while _exists(name) and name not in own:
            name = str(wanted.with_name(f"{wanted.stem}{self.join}v{version}{wanted.suffix}"))
            version += 1
        return name

    def _removable(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path for path in paths if self.folder in Path(path).parents and not _same(path, self.protected))


def _exists(path: str) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere."""
    return os.path.lexists(path) if path else False


def _same(path: str, other: str) -> bool:
    return bool(other) and Path(path).absolute() == Path(other).absolute()


def _same_file(name: str, other: str) -> bool:
    """Whether both names are there, and lead to one file."""
    return _exists(name) and _exists(other) and Path(name).samefile(other)


def _stands_alone(last: str, spare: str) -> bool:
    """Whether the content of ``last`` would be lost with its name: nothing but ``spare`` shares it."""
    file = Path(last)
    if file.is_symlink() or not file.exists():
        return False
    return file.stat().st_nlink == 1 or _same_file(spare, last)
