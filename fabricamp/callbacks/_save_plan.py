"""Plans what one save does to a ModelCheckpoint's files: rank 0, which sees the folder, plans; all ranks carry the plan out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from fabricamp.callbacks._rotation import Kept
from fabricamp.checkpoint import copy_checkpoint, link_checkpoint, places
from fabricamp.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One save, in this order: ``moves``, write ``target``, copy or link it to ``last``, ``remove``, publish ``after``."""

    target: str = ""
    """The path that the Trainer writes; empty if nothing is saved."""
    last: str = ""
    """The ``save_last`` name of ``target``."""
    moves: tuple[tuple[str, str], ...] = ()
    """(old, new) names of good files whose old name a new file takes; each gets its new name first."""
    after: Kept = field(default_factory=Kept)
    remove: tuple[str, ...] = ()

    def make_room(self) -> None:
        """Renames the files in ``moves``; runs before the new file is written."""
        for old, new in self.moves:
            _name_again(copy_checkpoint, old, new)

    def rotate(self, *, link: bool) -> None:
        """Updates the ``save_last`` file and removes surplus files; runs once the new file is verified."""
        if self.last and self.last != self.target:
            _name_again(link_checkpoint if link else copy_checkpoint, self.target, self.last)
        for path in self.remove:
            try:
                places.remove(path)
            except OSError as error:
                reason = error.strerror or error
                warnings.warn(f"cannot remove the old checkpoint {path}: {reason}", RuntimeWarning, stacklevel=2)


def _name_again(give_name: Callable[[str, str], None], old: str, new: str) -> None:
    """Gives the file at ``old`` another name; ignores a file that was removed meanwhile, with or without its folder."""
    try:
        give_name(old, new)
    except (CheckpointError, FileNotFoundError):
        if places.exists(old):
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlanner:
    """Plans the saves into one folder."""

    folder: str
    top_k: int
    mode: str
    versions: bool
    """Whether a name that exists gets a version suffix; otherwise the existing file is replaced."""
    link_last: bool
    join: str
    first_version: int
    protected: str = ""
    """The file that training resumed from; this run never removes it."""
    foreign: frozenset[str] = frozenset()
    """Files that a checkpoint names and this callback did not write; they are ranked, but never changed or removed."""

    def plan(self, kept: Kept, path: str, last: str, score: float | None) -> SavePlan:
        """Returns the plan of a save at ``path`` (if ``score`` is good enough) and at ``last``; either may be empty."""
        kept = kept.without({file for file in kept.all() if not places.exists(file)})
        moves: tuple[tuple[str, str], ...] = ()
        if path and (score is None or kept.ranks(score, self.top_k, self.mode)):
            staying = kept.files if self.top_k < 0 else kept.add("", score, self.top_k, self.mode).scores
            leaving = frozenset(kept.files).difference(staying, self.foreign)
            path = self._name(path, leaving)
            if path in leaving:
                aside = self._aside(path)
                moves, kept = ((path, aside),), kept.renamed(path, aside)
            after = kept.add(path, score, self.top_k, self.mode)
        else:
            path, after = "", kept
        if not last or (not path and self.link_last and kept.files):  # the link points to the newest file already
            return SavePlan(target=path, moves=moves, after=after, remove=self._removable(after.surplus(self.top_k)))
        return self._with_last(SavePlan(target=path, moves=moves, after=after), kept, last)

    def tidied(self, kept: Kept) -> Kept:
        """Removes files that a killed run had replaced but not removed yet; returns the rest of ``kept``.

        The next save would remove them too, but a run that resumes at its limit makes no save.
        """
        here = kept.without({file for file in kept.all() if not places.exists(file)})
        plan = SavePlan(after=here, remove=self._removable(here.surplus(self.top_k)))
        plan.rotate(link=False)
        return here.without(plan.remove)

    def _with_last(self, plan: SavePlan, kept: Kept, last: str) -> SavePlan:
        """Returns ``plan`` with the ``save_last`` file; the file that it replaces is kept until the next save."""
        old = "" if kept.last in kept.files else kept.last  # a file written at an exception is rotated like any other
        last = self._name(last, {old} - self.foreign)
        moves, spare = plan.moves, ""
        if old == last:
            spare = kept.spare if places.same_file(kept.spare, old) else self._aside(old)
            # Only the spare shares the old file's content: without another name that content would be lost.
            alone = not places.has_other_names(old) or places.same_file(spare, old)
            spare = spare if alone else ""
            moves += ((old, spare),) if spare else ()
        elif old and not places.is_link(old):
            spare = old
        after = replace(plan.after, last=last, spare=spare)
        dropped = {old, kept.spare} - {last, spare, ""}
        return SavePlan(
            target=plan.target or last,
            last=last,
            moves=moves,
            after=after,
            remove=self._removable((*after.surplus(self.top_k), *sorted(dropped))),
        )

    def _name(self, path: str, own: Collection[str]) -> str:
        """Returns ``path``, with a version suffix if a file of that name exists that is not in ``own``."""
        return self._versioned(path, own) if self.versions else path

    def _aside(self, path: str) -> str:
        """Returns a free name for the good file at ``path``, or the other name that a killed run already gave that file."""
        aside = places.with_name(path, f"{self.join}previous")
        return self._versioned(aside, {aside} if places.same_file(aside, path) else ())

    def _versioned(self, path: str, own: Collection[str]) -> str:
        name, version = path, self.first_version
        while places.exists(name) and name not in own:
            name = places.with_name(path, f"{self.join}v{version}")
            version += 1
        return name

    def _removable(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        kept = self.foreign | {self.protected}
        return tuple(path for path in paths if places.is_within(path, self.folder) and path not in kept)


def check_choices(mode: str, save_last: object, save_top_k: int, monitor: str | None) -> None:
    """Raises :class:`ConfigError` for invalid arguments about the files to keep."""
    if mode not in ("min", "max"):
        raise ConfigError(f"ModelCheckpoint(mode={mode!r}): choose 'min' (lower is better) or 'max'")
    if save_last not in (None, True, False, "link"):
        raise ConfigError(f"ModelCheckpoint(save_last={save_last!r}): choose True, False or 'link'")
    if save_top_k < -1:
        raise ConfigError(f"ModelCheckpoint(save_top_k={save_top_k}): give a number, 0 for none, -1 for all")
    if monitor is None and save_top_k > 1:
        raise ConfigError(
            f"ModelCheckpoint(save_top_k={save_top_k}) without a monitor: name a metric, or 'step' with mode='max'"
        )
