"""Checkpoint file names: a template such as ``"{epoch}-{val_loss:.2f}"`` filled with metrics."""

from __future__ import annotations

import math
import secrets
import string
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fabricamp.checkpoint import copy_checkpoint, how_far, link_checkpoint, read_header, storage
from fabricamp.errors import CheckpointError, ConfigError

# ~~~ from callbacks._file_names: Checkpoint file names: a template such as ``"{epoch}-{val_loss:.2f}"`` filled with metrics.


class FileName:
    """A template, parsed once; raises :class:`ConfigError` if numbers cannot fill its fields."""

    def __init__(self, template: str, equals: str = "=", *, insert_names: bool = True) -> None:
        self.fields: tuple[str, ...] = ()
        self._template = template
        self._equals = equals
        self._insert_names = insert_names
        try:
            self._pieces = [(text, name, spec or "") for text, name, spec, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise ConfigError(
                f"filename={template!r} is no template ({error}); write it like '{{epoch}}-{{val_loss:.2f}}'"
            ) from error
        for _, name, spec in self._pieces:
            if name is not None:
                self._check(name, spec)
                self.fields += (name,)

    def fill(self, metrics: Mapping[str, Tensor | float]) -> str:
        """Returns the name for these metrics; a metric that was not logged is written as 0, as in Lightning."""
        return "".join(text + self._show(name, spec, metrics) for text, name, spec in self._pieces)

    def _show(self, name: str | None, spec: str, metrics: Mapping[str, Tensor | float]) -> str:
        if name is None:
            return ""
        value = metrics.get(name, 0)
        shown = _format(value.item() if isinstance(value, Tensor) else value, spec)
        # A slash in a metric's name would create a folder.
        return f"{name.replace('/', '_')}{self._equals}{shown}" if self._insert_names else shown

    def _check(self, name: str, spec: str) -> None:
        if not name:
            raise ConfigError(
                f"filename={self._template!r} has an empty {{}}; name the metric, as in '{{epoch}}-{{val_loss:.2f}}'"
            )
        try:
            _format(1.0, spec)
        except ValueError as error:
            raise ConfigError(
                f"filename={self._template!r} cannot show {name!r} as {spec!r} ({error}); use a format like '.2f'"
            ) from error


def _format(value: float, spec: str) -> str:
    """Formats ``value`` by ``spec``; integer formats such as ``04d`` also accept floats."""
    if spec.endswith(("d", "x", "b", "o", "n")) and isinstance(value, float):
        return format(int(value), spec) if math.isfinite(value) else str(value)
    return format(value, spec)


# ~~~ from callbacks._rotation: Tracks which checkpoint files a run has, which are the best and which may be removed; touches no files.


_NEWEST = 2
"""Number of newest files kept whatever their score, because the disk may lose the very newest."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of one ModelCheckpoint.

    ``files`` are the files that rotation may remove, oldest first.  ``scores`` maps those in the top k to their monitor values,
    best first.  ``last`` is the ``save_last`` file, ``spare`` the file that it replaced.  ``current`` is the monitor value of the
    file that was ranked last.
    """

    files: tuple[str, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    best: str = ""
    last: str = ""
    spare: str = ""
    current: float | None = None

    def __setstate__(self, values: list[Any]) -> None:
        # A pickle of version 0.1.0 has no ``current``, the last field.
        object.__setattr__(self, "current", None)
        for one, value in zip(fields(self), values, strict=False):
            object.__setattr__(self, one.name, value)

    def ranks(self, score: float, top_k: int, mode: str) -> bool:
        """Returns whether a file with ``score`` would be among the best ``top_k`` (-1: always); nan is the worst score."""
        if top_k < 0 or len(self.scores) < top_k:
            return True
        return _order(score, mode) < max((_order(other, mode) for other in self.scores.values()), default=-math.inf)

    def add(self, path: str, score: float | None, top_k: int, mode: str) -> Kept:
        """Returns this with ``path`` as the newest file.

        A file without a score is not ranked; it becomes ``best`` only while no file is ranked.
        """
        files = (*(file for file in self.files if file != path), path)
        if score is None:
            return replace(self, files=files, best=self.best if self.scores else path)
        ranked = sorted((self.scores | {path: score}).items(), key=lambda item: _order(item[1], mode))
        scores = dict(ranked)
        while 0 <= top_k < len(scores):
            del scores[_worst_of(scores)]
        return replace(self, files=files, scores=scores, best=ranked[0][0], current=score)

    def surplus(self, top_k: int) -> tuple[str, ...]:
        """Returns the files that may be removed: neither in the top k nor among the newest."""
        if top_k < 0:
            return ()
        return tuple(file for file in self.files[:-_NEWEST] if file not in self.scores)

    def without(self, gone: Collection[str]) -> Kept:
        """Returns this without the files in ``gone``."""
        files = tuple(file for file in self.files if file not in gone)
        scores = {file: score for file, score in self.scores.items() if file not in gone}
        best = self.best if self.best not in gone else next(iter((*scores, *files[-1:])), "")
        last = "" if self.last in gone else self.last
        spare = "" if self.spare in gone else self.spare
        return replace(self, files=files, scores=scores, best=best, last=last, spare=spare)

    def renamed(self, old: str, new: str) -> Kept:
        """Returns this with the file ``old`` renamed to ``new``."""
        names = {old: new}
        files = tuple(names.get(file, file) for file in self.files)
        scores = {names.get(file, file): score for file, score in self.scores.items()}
        return replace(self, files=files, scores=scores, best=names.get(self.best, self.best))

    def worst(self, top_k: int) -> str:
        """Returns the file that the next better one pushes out of the top k; empty while fewer than k files are ranked."""
        return _worst_of(self.scores) if 0 < top_k == len(self.scores) else ""

    def all(self) -> set[str]:
        """Returns the names of all files."""
        return {*self.files, *self.scores, self.best, self.last, self.spare} - {""}

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint, under Lightning's keys if the meaning is the same."""
        return {
            "files": list(self.files),
            "best_k_models": dict(self.scores),
            "best_model_path": self.best,
            "last_model_path": self.last,
            "spare": self.spare,
            "current_score": self.current,
        }

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Kept:
        """Restores the result of :meth:`state_dict`, or Lightning's state, which has no list of files."""
        scores = {str(path): float(score) for path, score in state["best_k_models"].items()}
        best = str(state["best_model_path"])
        listed = state.get("files", list(scores) or [best] * bool(best))
        current = state.get("current_score")
        return Kept(
            files=tuple(listed),
            scores=scores,
            best=best,
            last=str(state["last_model_path"]),
            spare=str(state.get("spare", "")),
            current=None if current is None else float(current),
        )


def _worst_of(scores: dict[str, float]) -> str:
    """Returns the worst file in ``scores`` (best first); among equally bad ones the oldest, as in Lightning."""
    worst = list(scores.values())[-1]
    return next(path for path, score in scores.items() if score == worst or (math.isnan(score) and math.isnan(worst)))


def _order(score: float, mode: str) -> float:
    """Returns the sort key of ``score``: smaller is better, nan is last."""
    if math.isnan(score):
        return math.inf
    return -score if mode == "max" else score


# ~~~ from callbacks._save_plan: Plans what one save does to a ModelCheckpoint's files: rank 0, which sees the folder, plans; all ranks carry the plan out.


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
                storage.remove(path)
            except OSError as error:
                reason = error.strerror or error
                warnings.warn(f"cannot remove the old checkpoint {path}: {reason}", RuntimeWarning, stacklevel=2)


def _name_again(give_name: Callable[[str, str], None], old: str, new: str) -> None:
    """Gives the file at ``old`` another name; ignores a file that was removed meanwhile, with or without its folder."""
    try:
        give_name(old, new)
    except (CheckpointError, FileNotFoundError):
        if storage.exists(old):
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
        kept = kept.without({file for file in kept.all() if not storage.exists(file)})
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
        here = kept.without({file for file in kept.all() if not storage.exists(file)})
        plan = SavePlan(after=here, remove=self._removable(here.surplus(self.top_k)))
        plan.rotate(link=False)
        return here.without(plan.remove)

    def _with_last(self, plan: SavePlan, kept: Kept, last: str) -> SavePlan:
        """Returns ``plan`` with the ``save_last`` file; the file that it replaces is kept until the next save."""
        old = "" if kept.last in kept.files else kept.last  # a file written at an exception is rotated like any other
        last = self._name(last, {old} - self.foreign)
        moves, spare = plan.moves, ""
        if old == last:
            spare = kept.spare if storage.same_file(kept.spare, old) else self._aside(old)
            # Only the spare shares the old file's content: without another name that content would be lost.
            alone = not storage.has_other_names(old) or storage.same_file(spare, old)
            spare = spare if alone else ""
            moves += ((old, spare),) if spare else ()
        elif old and not storage.is_link(old):
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
        aside = storage.with_name(path, f"{self.join}previous")
        return self._versioned(aside, {aside} if storage.same_file(aside, path) else ())

    def _versioned(self, path: str, own: Collection[str]) -> str:
        name, version = path, self.first_version
        while storage.exists(name) and name not in own:
            name = storage.with_name(path, f"{self.join}v{version}")
            version += 1
        return name

    def _removable(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        kept = self.foreign | {self.protected}
        return tuple(path for path in paths if storage.is_within(path, self.folder) and path not in kept)


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


# ~~~ from callbacks._lineage: Finds a ModelCheckpoint's own files: each file names the attempt that wrote it, and a run knows its previous attempts.


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
