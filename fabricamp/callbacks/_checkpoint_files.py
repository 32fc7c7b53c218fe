"""The files of a ModelCheckpoint: their names, which ones stay, what one save does to them, which run owns them, and their folders.

In this order: :class:`FileNameTemplate` is filled with metrics.  :class:`KeptFiles` ranks the files and says which are surplus; it
touches none.  :class:`SavePlanner` makes a :class:`SavePlan` of both on rank 0, which sees the folder; all ranks carry it out.
:class:`Lineage` finds a resumed run's own files by the id that each file holds.  The functions at the end look at a callback: its
planner, the folders and files that belong to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import string
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from fabricamp.checkpoint import copy_checkpoint, link_checkpoint, progress_in, read_header, storage
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.metrics.values import number_tensor

if TYPE_CHECKING:
    from fabricamp._utils.types import CheckpointFiles, StateDict
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.trainer import Trainer

_NEWEST = 2
"""Number of newest files kept whatever their score, because the disk may lose the very newest."""

WRITTEN_BY = "written_by"
"""The checkpoint key with the id of the ModelCheckpoint attempt that wrote the file."""


class FileNameTemplate:
    """A template such as ``"{epoch}-{val_loss:.2f}"``; :func:`template_of` parses each one once.

    Raises :class:`ConfigError` if numbers cannot fill its fields.
    """

    def __init__(self, template: str) -> None:
        self.fields: tuple[str, ...] = ()
        self._template = template
        try:
            self._pieces = [(text, name, spec or "") for text, name, spec, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise ConfigError(
                f"filename={template!r} is not a template ({error}); write it like '{{epoch}}-{{val_loss:.2f}}'"
            ) from None
        for _, name, spec in self._pieces:
            if name is not None:
                self._check(name, spec)
                self.fields += (name,)

    def fill(self, metrics: Mapping[str, Tensor | float], equals: str | None) -> str:
        """Returns the name for these metrics; a metric that was not logged is written as 0, as in Lightning.

        ``equals`` stands between a metric's name and its value; None leaves the names out.
        """
        filled = ""
        for text, name, spec in self._pieces:
            filled += text
            if name is not None:
                value = metrics.get(name, 0)
                if equals is not None:
                    filled += name.replace("/", "_") + equals  # a slash would create a folder
                filled += _format(value.item() if isinstance(value, Tensor) else value, spec)
        return filled

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
            ) from None


template_of: Final = functools.lru_cache(FileNameTemplate)
"""Returns the parsed template of a text."""


def _format(value: float, spec: str) -> str:
    """Formats ``value`` by ``spec``; integer formats such as ``04d`` also accept floats."""
    if spec.endswith(("d", "x", "b", "o", "n")) and isinstance(value, float):
        return format(int(value), spec) if math.isfinite(value) else str(value)
    return format(value, spec)


@dataclass(frozen=True, slots=True)
class KeptFiles:
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

    def ranks(self, score: float, top_k: int, mode: str) -> bool:
        """Returns whether a file with ``score`` would be among the best ``top_k`` (-1: always); nan is the worst score."""
        if top_k < 0 or len(self.scores) < top_k:
            return True
        worst = max((sort_key(other, mode) for other in self.scores.values()), default=-math.inf)
        return sort_key(score, mode) < worst

    def add(self, path: str, score: float | None, top_k: int, mode: str) -> KeptFiles:
        """Returns this with ``path`` as the newest file.

        A file without a score is not ranked; it becomes ``best`` only while no file is ranked.
        """
        files = (*(file for file in self.files if file != path), path)
        if score is None:
            return replace(self, files=files, best=self.best if self.scores else path)
        if math.isnan(score):  # the worst, as in Lightning
            score = -math.inf if mode == "max" else math.inf
        ranked = sorted((self.scores | {path: score}).items(), key=lambda item: sort_key(item[1], mode))
        scores = dict(ranked)
        while 0 <= top_k < len(scores):
            del scores[_worst_of(scores)]
        return replace(self, files=files, scores=scores, best=ranked[0][0], current=score)

    def surplus(self, top_k: int) -> tuple[str, ...]:
        """Returns the files that may be removed: neither in the top k nor among the newest."""
        if top_k < 0:
            return ()
        return tuple(file for file in self.files[:-_NEWEST] if file not in self.scores)

    def without(self, gone: Collection[str]) -> KeptFiles:
        """Returns this without the files in ``gone``."""
        files = tuple(file for file in self.files if file not in gone)
        scores = {file: score for file, score in self.scores.items() if file not in gone}
        best = self.best
        if best in gone:  # then the best of the others, or the newest if none is ranked
            best = next(iter((*scores, *files[-1:])), "")
        last = "" if self.last in gone else self.last
        spare = "" if self.spare in gone else self.spare
        return replace(self, files=files, scores=scores, best=best, last=last, spare=spare)

    def renamed(self, old: str, new: str) -> KeptFiles:
        """Returns this with the file ``old`` renamed to ``new``."""
        names = {old: new}
        files = tuple(names.get(file, file) for file in self.files)
        scores = {names.get(file, file): score for file, score in self.scores.items()}
        return replace(self, files=files, scores=scores, best=names.get(self.best, self.best))

    def worst(self, top_k: int) -> str:
        """Returns the file that the next better one pushes out of the top k; empty while fewer than k files are ranked."""
        return _worst_of(self.scores) if 0 < top_k == len(self.scores) else ""

    def shown(self) -> dict[str, Tensor]:
        """Returns the files in the top k with their monitor values as tensors, as ``best_k_models`` shows them."""
        return {path: number_tensor(score) for path, score in self.scores.items()}

    def edited(self, shown: Mapping[str, Tensor], mode: str) -> KeptFiles:
        """Returns this with the files and values of ``shown``, the result of :meth:`shown` that a program may have changed."""
        found: dict[str, float] = {}
        for path, value in shown.items():
            known = self.scores.get(path)
            # The dict has most values in fp32; a value that was not changed keeps its digits.
            unchanged = known is not None and bool(number_tensor(known) == float(value))
            found[str(path)] = known if unchanged and known is not None else float(value)
        if found == self.scores:
            return self
        return replace(self, scores=dict(sorted(found.items(), key=lambda item: sort_key(item[1], mode))))

    def all(self) -> set[str]:
        """Returns the names of all files."""
        return {*self.files, *self.scores, self.best, self.last, self.spare} - {""}

    def state_dict(self) -> StateDict:
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
    def from_state_dict(state: StateDict) -> KeptFiles:
        """Restores the result of :meth:`state_dict`, or Lightning's state, which has no list of files."""
        scores = {str(path): float(score) for path, score in state["best_k_models"].items()}
        best = str(state["best_model_path"])
        listed = state.get("files", list(scores) or [best] * bool(best))
        current = state.get("current_score")
        return KeptFiles(
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
    if math.isnan(worst):  # nan is not equal to itself
        return next(path for path, score in scores.items() if math.isnan(score))
    return next(path for path, score in scores.items() if score == worst)


def sort_key(score: float, mode: str) -> float:
    """Returns the sort key of ``score``: smaller is better, nan is last."""
    if math.isnan(score):
        return math.inf
    return -score if mode == "max" else score


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One save, in this order: ``moves``, write ``target``, copy or link it to ``last``, ``remove``, publish ``after``."""

    target: str = ""
    """The path that the Trainer writes; empty if nothing is saved."""
    last: str = ""
    """The ``save_last`` name of ``target``."""
    link_last: bool = False
    """Whether ``last`` is a symbolic link to ``target``, not a copy."""
    moves: tuple[tuple[str, str], ...] = ()
    """(old, new) names of good files whose old name a new file takes; each gets its new name first."""
    after: KeptFiles = field(default_factory=KeptFiles)
    remove: tuple[str, ...] = ()

    def make_room(self) -> None:
        """Renames the files in ``moves``; runs before the new file is written."""
        for old, new in self.moves:
            _add_name(copy_checkpoint, old, new)

    def rotate(self) -> None:
        """Updates the ``save_last`` file and removes surplus files; runs once the new file is verified."""
        if self.last and self.last != self.target:
            _add_name(link_checkpoint if self.link_last else copy_checkpoint, self.target, self.last)
        for path in self.remove:
            try:
                storage.remove(path)
            except OSError as error:
                reason = error.strerror or error
                warnings.warn(f"cannot remove the old checkpoint {path}: {reason}", RuntimeWarning, stacklevel=2)


def _add_name(link_or_copy: Callable[[str, str], None], old: str, new: str) -> None:
    """Gives the file at ``old`` another name; ignores a file that was removed meanwhile, with or without its folder."""
    try:
        link_or_copy(old, new)
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

    def plan(self, kept: KeptFiles, path: str, last: str, score: float | None) -> SavePlan:
        """Returns the plan of a save at ``path`` (if ``score`` is good enough) and at ``last``; either may be empty."""
        kept = kept.without({file for file in kept.all() if not storage.exists(file)})
        moves: tuple[tuple[str, str], ...] = ()
        after = kept
        if path and score is not None and not kept.ranks(score, self.top_k, self.mode):
            path = ""
        if path:
            replaceable = self._files_that_leave(kept, score)
            path = self._name(path, replaceable)
            if path in replaceable:  # until the new file is complete, the old one stays under another name
                aside = self._name_aside(path)
                moves = ((path, aside),)
                kept = kept.renamed(path, aside)
            after = kept.add(path, score, self.top_k, self.mode)
        link_is_up_to_date = self.link_last and not path and bool(kept.files)
        if last and not link_is_up_to_date:
            return self._plan_with_last(path, last, moves, kept, after)
        return SavePlan(target=path, moves=moves, after=after, remove=self._removable(after.surplus(self.top_k)))

    def _files_that_leave(self, kept: KeptFiles, score: float | None) -> frozenset[str]:
        """Returns the files outside the top k once a file with ``score`` is in it; the new file may take one of their names."""
        if self.top_k < 0:
            return frozenset()
        staying = kept.add("", score, self.top_k, self.mode).scores
        return frozenset(kept.files).difference(staying, self.foreign)

    def _plan_with_last(
        self, path: str, last: str, moves: tuple[tuple[str, str], ...], kept: KeptFiles, after: KeptFiles
    ) -> SavePlan:
        """Returns a plan with the ``save_last`` file; the file that it replaces is kept until the next save."""
        old = "" if kept.last in kept.files else kept.last  # a file written at an exception is rotated like any other
        last = self._name(last, {old} - self.foreign)
        spare = ""
        if old == last:
            spare = kept.spare if storage.same_file(kept.spare, old) else self._name_aside(old)
            # Only the spare shares the old file's content: without another name that content would be lost.
            has_no_other_copy = not storage.has_other_names(old) or storage.same_file(spare, old)
            if has_no_other_copy:
                moves += ((old, spare),)
            else:
                spare = ""
        elif old and not storage.is_link(old):
            spare = old
        after = replace(after, last=last, spare=spare)
        replaced = {old, kept.spare} - {last, spare, ""}
        return SavePlan(
            target=path or last,
            last=last,
            link_last=self.link_last,
            moves=moves,
            after=after,
            remove=self._removable((*after.surplus(self.top_k), *sorted(replaced))),
        )

    def remove_leftovers(self, kept: KeptFiles) -> KeptFiles:
        """Removes files that a killed run had replaced but not removed yet; returns the rest of ``kept``.

        The next save would remove them too, but a run that resumes at its limit makes no save.
        """
        existing = kept.without({file for file in kept.all() if not storage.exists(file)})
        plan = SavePlan(after=existing, remove=self._removable(existing.surplus(self.top_k)))
        plan.rotate()
        return existing.without(plan.remove)

    def _name(self, path: str, own: Collection[str]) -> str:
        """Returns ``path``, with a version suffix if a file of that name exists that is not in ``own``."""
        return self._versioned(path, own) if self.versions else path

    def _name_aside(self, path: str) -> str:
        """Returns a free name for the good file at ``path``, or the other name that a killed run already gave that file."""
        aside = storage.with_stem_suffix(path, f"{self.join}previous")
        return self._versioned(aside, {aside} if storage.same_file(aside, path) else ())

    def _versioned(self, path: str, own: Collection[str]) -> str:
        name = path
        version = self.first_version
        while storage.exists(name) and name not in own:
            name = storage.with_stem_suffix(path, f"{self.join}v{version}")
            version += 1
        return name

    def _removable(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        never = self.foreign | {self.protected}
        return tuple(path for path in paths if storage.is_within(path, self.folder) and path not in never)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The attempts (one per ``fit``) of one ModelCheckpoint that led to the current run.

    ``earlier`` maps each previous attempt to the step from which the next one resumed.  Files that an attempt wrote after that
    step belong to another branch.
    """

    attempt: str = ""
    earlier: dict[str, int] = field(default_factory=dict)

    def next_attempt(self, step: int) -> Lineage:
        """Returns a new attempt that resumes from ``step`` of this one."""
        earlier = {**self.earlier, self.attempt: step} if self.attempt else self.earlier
        return Lineage(secrets.token_hex(8), earlier)

    def sort_key(self, header: StateDict) -> tuple[int, ...]:
        """Returns a sort key for files of this lineage, newest last; an empty key for a file of no attempt in it."""
        attempt = header.get(WRITTEN_BY)
        progress = progress_in(header)
        step = progress[0]
        if not isinstance(attempt, str) or step > self.earlier.get(attempt, -1):
            return ()
        return (*progress, list(self.earlier).index(attempt))

    def only(self, attempts: Iterable[Any]) -> Lineage:
        """Returns this lineage with only those earlier attempts that are in ``attempts`` (they still have files)."""
        wanted = set(attempts)
        return Lineage(self.attempt, {attempt: step for attempt, step in self.earlier.items() if attempt in wanted})

    def state_dict(self) -> StateDict:
        """Returns the lineage as plain values, for a checkpoint."""
        return {"attempt": self.attempt, "earlier_attempts": dict(self.earlier)}

    @staticmethod
    def from_state_dict(state: StateDict) -> Lineage:
        """Restores :meth:`state_dict`; empty if the state is Lightning's."""
        earlier = {str(name): int(step) for name, step in state.get("earlier_attempts", {}).items()}
        return Lineage(str(state.get("attempt", "")), earlier)


def find_own_files(
    kept: KeptFiles,
    lineage: Lineage,
    files: Iterable[str],
    trusts: Callable[[str], bool],
    io: CheckpointFiles | None = None,
) -> tuple[KeptFiles, frozenset[str], Lineage]:
    """Returns (files a resumed callback continues with, paths among them that it did not write, its lineage).

    A checkpoint is up to date only for the ModelCheckpoint that wrote it.  So each callback reads the list of its files from its
    own newest file, and forgets none.  A file is never removed only because a checkpoint names it.
    """
    sort_keys: dict[str, tuple[int, ...]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for path in files:
        try:
            header = read_header(path, io)
        except CheckpointError:
            continue  # damaged: its writer is unknown
        if sort_key := lineage.sort_key(header):
            sort_keys[path] = sort_key
            headers[path] = header
    if headers:
        newest = max(headers, key=lambda path: sort_keys[path])
        kept = _kept_files_in(headers[newest]) or kept
    kept = kept.without({path for path in kept.all() if not trusts(path)})
    lineage = lineage.only(header[WRITTEN_BY] for header in headers.values())
    return kept, frozenset(kept.all() - headers.keys()), lineage


def _kept_files_in(header: StateDict) -> KeptFiles | None:
    """Returns the kept files of the callback that wrote the file with ``header``; None if its state is not in the header."""
    states = header.get("callbacks")
    if not isinstance(states, dict):
        return None
    for state in states.values():
        if isinstance(state, dict) and state.get("attempt") == header[WRITTEN_BY]:
            try:
                return KeptFiles.from_state_dict(state)
            except (AttributeError, KeyError, TypeError, ValueError):
                return None
    return None


def planner_of(trainer: Trainer, callback: ModelCheckpoint, foreign: frozenset[str]) -> SavePlanner:
    """Returns what plans the callback's saves; files in ``foreign`` stay as they are."""
    return SavePlanner(
        folder=callback.dirpath or "",
        top_k=callback.save_top_k,
        mode=callback.mode,
        versions=callback.enable_version_counter,
        link_last=callback.save_last == "link",
        join=callback.CHECKPOINT_JOIN_CHAR,
        first_version=callback.STARTING_VERSION,
        protected=storage.normalized(trainer.ckpt_path) if trainer.ckpt_path else "",
        foreign=foreign,
    )


def possible_folders(trainer: Trainer, callback: ModelCheckpoint) -> Iterator[str]:
    """Yields the folders that a ModelCheckpoint of this Trainer writes to, or would have written to in earlier runs."""
    if callback.dirpath_given:
        yield callback.dirpath or ""
        return
    for logger in trainer.loggers:
        for folder in logger.run_folders():
            yield storage.join(str(folder), "checkpoints")
    yield storage.join(trainer.root_folder, "checkpoints")


def trusted_folders(trainer: Trainer, callback: ModelCheckpoint, checkpoint: str) -> tuple[str, ...]:
    """Returns the folders in which file names from a checkpoint are accepted: the callback's and the checkpoint's own."""
    folders = (callback.dirpath or "", _folder_of(checkpoint, callback), *possible_folders(trainer, callback))
    return tuple(dict.fromkeys(folder for folder in folders if folder))


def files_beside(trainer: Trainer, callback: ModelCheckpoint) -> list[str]:
    """Returns the files in the callback's folder and in the folder of the checkpoint that training resumes from."""
    files: list[str] = []
    for folder in dict.fromkeys((callback.dirpath or "", _folder_of(trainer.ckpt_path or "", callback))):
        if folder:
            with contextlib.suppress(OSError):  # a folder that cannot be listed
                files += files_in(folder, callback)
    return files


def files_in(folder: str, callback: ModelCheckpoint) -> list[str]:
    """Returns the files in ``folder`` with the callback's extension, as deep as slashes in ``filename`` put them.

    Raises ``OSError`` if a folder cannot be listed.
    """
    return storage.files_in(folder, callback.FILE_EXTENSION, _depth(callback))


def _folder_of(checkpoint: str, callback: ModelCheckpoint) -> str:
    """Returns the local folder of a checkpoint, higher by one level per slash in ``filename``; empty for a remote one."""
    if not checkpoint or storage.is_remote(checkpoint):
        return ""
    parents = Path(storage.normalized(checkpoint)).parents
    return str(parents[min(_depth(callback), len(parents) - 1)])


def _depth(callback: ModelCheckpoint) -> int:
    """Returns how many folders below ``dirpath`` the callback's files are: the slashes in ``filename`` create them."""
    return (callback.filename or "").count("/")
