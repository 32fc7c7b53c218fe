"""Resolves ``ckpt_path="last"``, ``"best"`` and ``"auto"``: rank 0 finds the file, every rank gets the same one."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.base import matched_states
from fabricamp.checkpoint import Candidates, read_header, read_together, storage
from fabricamp.errors import CheckpointError, ConfigError, FabricampError, MissingCheckpointError, nearest
from fabricamp.launch import restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")
_WORDS = ("auto", "best", "last")
_EVALUATED = ("best", "last")


def model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Returns every ModelCheckpoint of the Trainer; they know which files exist and which one is the best."""
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint  # here, because that module imports this one

    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def resolve_checkpoint(trainer: Trainer, ckpt_path: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Returns (file to load or None, its content if it was read already); every rank calls this, rank 0 chooses.

    "last" is the furthest checkpoint that every rank can read, of this run or of earlier runs in folders beside this run's;
    "auto" is the same, or None if there is none; "best" is the best file of the first ModelCheckpoint.  A path is returned
    unchanged.  Raises :class:`MissingCheckpointError` if no file is found, and :class:`CheckpointError` if none of the found
    files can be read.
    """
    if ckpt_path not in _WORDS:
        _refuse_a_misspelt_word(trainer, ckpt_path)
        alone = not trainer.strategy.heals
        if ckpt_path is None and alone and trainer.state.fitting and trainer.local_rank == 0 and restarts():
            _LOG.warning("torchrun has restarted this run from the beginning; ckpt_path='auto' would resume it")
        return ckpt_path, None
    if ckpt_path == "auto" and not trainer.state.fitting:
        raise ConfigError(
            "ckpt_path='auto' is for fit: it goes on from the last checkpoint, or starts; give 'last' or 'best'"
        )
    place, checkpoint = "", None
    if ckpt_path == "best":
        place = _from_rank_zero(trainer, ckpt_path, lambda: _best(trainer))
    else:
        place, checkpoint = _furthest(trainer, ckpt_path)
    if not place and ckpt_path != "auto":
        raise MissingCheckpointError(f"ckpt_path={ckpt_path!r}: {_nothing_found(trainer, ckpt_path)}")
    return place or None, checkpoint


def _refuse_a_misspelt_word(trainer: Trainer, ckpt_path: str | None) -> None:
    """Raises :class:`MissingCheckpointError` if ``ckpt_path`` does not exist and looks like one of the words misspelt."""
    if ckpt_path is None or storage.is_remote(ckpt_path) or Path(ckpt_path).name != ckpt_path or Path(ckpt_path).suffix:
        return
    words = _WORDS if trainer.state.fitting else _EVALUATED
    if (hint := nearest(ckpt_path, words)) and not storage.exists(ckpt_path):
        raise MissingCheckpointError(f"ckpt_path={ckpt_path!r} is not there{hint}")


def best_of_last_fit(trainer: Trainer, entry_point: str) -> str:
    """Returns the file that ``entry_point`` loads when called with neither a module nor a ckpt_path.

    The file is the best one of the first ModelCheckpoint; without a monitor, the newest.  Raises
    :class:`MissingCheckpointError` if there is none.
    """
    callback = next(iter(model_checkpoints(trainer)), None)
    if callback is not None and callback.best_model_path:
        return callback.best_model_path
    if trainer.fast_dev_run:
        why = f"fast_dev_run={int(trainer.fast_dev_run)} saves none"
    elif callback is None:
        why = "this Trainer has no ModelCheckpoint"
    else:
        why = f"{type(callback).__name__} has saved nothing that it could call the best"
    raise MissingCheckpointError(
        f"trainer.{entry_point}() without a module loads the best checkpoint of the last fit, and there is none: {why}; pass the "
        f"module to take its weights as they are, trainer.{entry_point}(module), or name a file, ckpt_path='last' or a path"
    )


def _furthest(trainer: Trainer, word: str) -> tuple[str, dict[str, Any] | None]:
    """Returns the furthest checkpoint that every rank can read, and its content; all ranks skip a file that one cannot read."""
    candidates = _candidates(trainer)
    while place := _from_rank_zero(trainer, word, candidates.next_place):
        try:
            return place, read_together(place, trainer.strategy)
        except CheckpointError as error:
            if trainer.is_global_zero:
                candidates.pass_over(str(error))
    return "", None


def _from_rank_zero(trainer: Trainer, word: str, choose: Callable[[], str]) -> str:
    """Returns the file that ``choose`` returns on rank 0; every rank raises rank 0's error."""

    def chosen() -> str:
        try:
            return choose()
        except FabricampError as error:
            raise CheckpointError(f"ckpt_path={word!r}: {error}") from error

    return trainer.strategy.on_rank_zero(chosen)


def _nothing_found(trainer: Trainer, word: str) -> str:
    folders = (folder for one in model_checkpoints(trainer) for folder in _folders(trainer, one))
    looked = ", ".join(dict.fromkeys(folders)) or "no folder"
    missing = (
        f"no ModelCheckpoint of this Trainer has saved one yet (looked in: {looked})"
        if model_checkpoints(trainer)
        else "this Trainer has no ModelCheckpoint"
    )
    return f"{missing}; give a path" + (", or ckpt_path='auto' to start where there is none" if word == "last" else "")


def _candidates(trainer: Trainer) -> Candidates:
    """Returns this run's files, then those of each folder that may belong to an earlier attempt, newest run first."""
    callbacks = model_checkpoints(trainer)

    def groups() -> Iterator[list[str]]:
        files = [path for one in callbacks for path in one.known_files() if storage.exists(path)]
        given = (one for one in callbacks if one.dirpath_given)
        yield files + [path for one in given for folder in _folders(trainer, one) for path in listed(one, folder)]
        for one in callbacks:
            if not one.dirpath_given:
                yield from (listed(one, folder) for folder in _folders(trainer, one))

    def listed(callback: ModelCheckpoint, folder: str) -> list[str]:
        try:
            return _files(callback, folder)
        except OSError as error:
            where, reason = error.filename or folder, error.strerror or error
            candidates.pass_over(f"{where} cannot be listed ({reason}), and there may be checkpoints in it")
            return []

    candidates = Candidates(groups(), training=trainer.state.fitting)
    return candidates


def _best(trainer: Trainer) -> str:
    """Returns the best file that this Trainer knows, else the best file named in the last checkpoint of an earlier process."""
    for callback in model_checkpoints(trainer):
        if callback.best_model_path:
            return callback.best_model_path
    last = _candidates(trainer).next_place()
    states = read_header(last).get("callbacks") if last else None
    for callback, state in matched_states(model_checkpoints(trainer), states if isinstance(states, dict) else {}):
        best = state.get("best_model_path") if isinstance(state, dict) else ""
        if not best:
            continue
        folders = followed_folders(trainer, callback, last)
        own = str(best).endswith(callback.FILE_EXTENSION)
        if own and any(storage.may_follow(str(best), folder) for folder in folders):
            return str(best)
        raise CheckpointError(
            f"{last} names {best} as the best, which is no {callback.FILE_EXTENSION} file in {' or '.join(folders)}; give its path"
        )
    return ""


def _files(callback: ModelCheckpoint, folder: str) -> list[str]:
    """Returns the files in ``folder`` with the callback's extension, as deep as slashes in ``filename`` put them.

    Raises ``OSError`` if a folder cannot be listed.
    """
    return storage.files_in(folder, callback.FILE_EXTENSION, (callback.filename or "").count("/"))


def followed_folders(trainer: Trainer, callback: ModelCheckpoint, checkpoint: str) -> tuple[str, ...]:
    """Returns the folders in which file names from a checkpoint are accepted: the callback's and the checkpoint's own."""
    folders = (callback.dirpath or "", _folder_of(checkpoint, callback), *_folders(trainer, callback))
    return tuple(dict.fromkeys(folder for folder in folders if folder))


def files_beside(trainer: Trainer, callback: ModelCheckpoint) -> list[str]:
    """Returns the files in the callback's folder and in the folder of the checkpoint that training resumes from."""
    found: list[str] = []
    for folder in dict.fromkeys((callback.dirpath or "", _folder_of(trainer.ckpt_path or "", callback))):
        with contextlib.suppress(OSError):  # a folder that cannot be listed
            found += _files(callback, folder) if folder else []
    return found


def _folder_of(checkpoint: str, callback: ModelCheckpoint) -> str:
    """Returns the local folder of a checkpoint, higher by one level per slash in ``filename``; empty for a remote one."""
    if not checkpoint or storage.is_remote(checkpoint):
        return ""
    parents = Path(storage.normal(checkpoint)).parents
    return str(parents[min((callback.filename or "").count("/"), len(parents) - 1)])


def _folders(trainer: Trainer, callback: ModelCheckpoint) -> Iterator[str]:
    """Yields the folders that a ModelCheckpoint of this Trainer writes to, or would have written to in earlier runs."""
    if callback.dirpath_given:
        yield callback.dirpath or ""
        return
    for logger in trainer.loggers:
        for folder in logger.run_folders():
            yield storage.join(str(folder), "checkpoints")
    yield storage.join(trainer.root_folder, "checkpoints")
