"""Uploads checkpoints for loggers with ``log_model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from fabricamp._utils.types import StateDict
from fabricamp.errors import ConfigError
from fabricamp.loggers.logger_errors import LoggerErrors
from fabricamp.loggers.write_queue import WriteQueue

if TYPE_CHECKING:
    from torch import Tensor

UPLOAD_SECONDS = 600.0
"""How long the end of a successful fit waits for uploads of checkpoints."""
LAST_SECONDS = 30.0
"""How long the end of a failed fit waits for uploads."""

_CALLBACK_OPTIONS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
_REMOTE = -1


class SavesCheckpoints(Protocol):
    """What a logger that uploads files asks of a callback that saves them: a ``ModelCheckpoint``, or one of a user's own."""

    @property
    def best_k_models(self) -> Mapping[str, Tensor]:
        """The best files, with the monitored value of each."""
        ...

    @property
    def best_model_path(self) -> str:
        """The best file; empty if there is none."""
        ...

    @property
    def last_model_path(self) -> str:
        """The newest file; empty if there is none."""
        ...


class Saved(NamedTuple):
    """A checkpoint file or folder, as it was when it was found; ``changed_at`` is its time of change in ns."""

    path: str
    changed_at: int
    aliases: list[str]
    metadata: dict[str, object]

    @property
    def name(self) -> str:
        """The file's name without the suffix."""
        return Path(self.path).stem

    @property
    def is_local(self) -> bool:
        """Whether the file is on a local disk, not at a URL."""
        return self.changed_at != _REMOTE


class Uploads:
    """Uploads checkpoints: with "all" each one when it is saved, with True those that remain when a fit ends.

    ``upload`` is called in a separate thread, so neither steps nor rows of values wait for a large file.

    Raises:
        ConfigError: ``log_model`` is not True, False or "all".
    """

    def __init__(self, owner: str, log_model: Literal["all"] | bool, upload: Callable[[Saved], None]) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigError(
                f"{owner}(log_model={log_model!r}): choose True (the best and last checkpoints, when a fit ends), 'all' (each when "
                "it is saved) or False"
            )
        self.when = log_model
        self._upload = upload
        self._done: dict[str, int] = {}
        self._clear()

    def after_save(self, callback: SavesCheckpoints, errors: LoggerErrors) -> None:
        """Records that ``callback`` has a new file; with "all" queues the file."""
        if not self.when:
            return
        self._callbacks[id(callback)] = callback
        if self.when == "all":
            self._put(callback)
        self._queue.report(errors)

    def finish(self, errors: LoggerErrors, *, succeeded: bool, answers: bool = True) -> None:
        """Ends a fit; after a successful one uploads the remaining files, waiting up to ten minutes (if the server ``answers``)."""
        if succeeded:
            for callback in self._callbacks.values():
                self._put(callback)
        queue = self._queue
        self._clear()
        queue.close(UPLOAD_SECONDS if succeeded and answers else LAST_SECONDS)
        queue.report(errors)

    def _put(self, callback: SavesCheckpoints) -> None:
        for saved in self._not_uploaded(callback):
            self._done[saved.path] = saved.changed_at
            self._queue.put(saved)

    def _send(self, items: Sequence[Saved]) -> None:
        for saved in items:
            self._upload(saved)

    def _not_uploaded(self, callback: SavesCheckpoints) -> list[Saved]:
        """Returns the best and last files whose current version was not uploaded, in the order of writing."""
        scores = callback.best_k_models
        paths = dict.fromkeys([*scores, callback.best_model_path, callback.last_model_path])
        files = [(_changed_at(path), path) for path in paths if path]
        return [
            Saved(path, changed_at, _aliases(callback, path), _metadata(callback, path, scores.get(path)))
            for changed_at, path in sorted(files)
            if changed_at and self._done.get(path) != changed_at
        ]

    def _clear(self) -> None:
        self._callbacks: dict[int, SavesCheckpoints] = {}
        self._queue: WriteQueue[Saved] = WriteQueue(self._send, most_at_once=1)

    def __getstate__(self) -> StateDict:
        own = ("_callbacks", "_queue")  # of this process only
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._clear()


def _changed_at(path: str) -> int:
    """Returns when the file was changed, in ns; 0 if the file is gone, ``_REMOTE`` for a URL."""
    if "://" in path:
        return _REMOTE
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _aliases(callback: SavesCheckpoints, path: str) -> list[str]:
    return ["latest", "best"] if path == callback.best_model_path else ["latest"]


def _metadata(callback: SavesCheckpoints, path: str, score: Tensor | None) -> dict[str, object]:
    return {
        "score": None if score is None else float(score),
        "original_filename": Path(path).name,
        "ModelCheckpoint": {name: getattr(callback, name) for name in _CALLBACK_OPTIONS},
    }
