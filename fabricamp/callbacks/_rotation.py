"""Tracks which checkpoint files a run has, which are the best and which may be removed; touches no files."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

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
