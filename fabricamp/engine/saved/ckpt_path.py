"""Resolves ``ckpt_path="last"``, ``"best"`` and ``"auto"``: rank 0 finds the file, every rank gets the same one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fabricamp.callbacks._checkpoint_files import files_in, possible_folders, trusted_folders
from fabricamp.callbacks.base import matched_states
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.checkpoint import Candidates, read_header, read_together, storage
from fabricamp.checkpoint.checkpoint_io import is_asynchronous, wait_for, writes_own_files
from fabricamp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointObjectsError,
    ConfigError,
    FabricampError,
    MissingCheckpointError,
    nearest,
    reworded,
)
from fabricamp.launch import restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp._utils.types import StateDict
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")
_WORDS = ("auto", "best", "last")
_EVALUATED = ("best", "last")


def resolve_checkpoint(
    trainer: Trainer, ckpt_path: str | None, *, weights_only: bool | None = None
) -> tuple[str | None, StateDict | None]:
    """Returns (file to load or None, its content if it was read already); every rank calls this, rank 0 chooses.

    "last" is the checkpoint furthest in training that every rank can read, of this run or of earlier runs in sibling folders;
    "auto" is the same, or None if there is none; "best" is the best file of the first ModelCheckpoint.  A path is returned
    unchanged.  Raises :class:`MissingCheckpointError` if no file is found, :class:`CheckpointError` if none of the found files can
    be read, and :class:`CheckpointObjectsError` if the chosen one holds objects and ``weights_only`` is not False.
    """
    io = trainer.strategy.checkpoint_io
    if is_asynchronous(io):
        trainer.strategy.on_rank_zero(lambda: wait_for(io))
    if ckpt_path not in _WORDS:
        _refuse_a_misspelt_word(trainer, ckpt_path)
        begins_anew = ckpt_path is None and trainer.state.fitting
        # With an elastic strategy (``heals``) a restarted replica gets its state from the others.
        if begins_anew and not trainer.strategy.membership.heals and trainer.local_rank == 0 and restarts():
            _LOG.warning("torchrun has restarted this run from the beginning; ckpt_path='auto' would resume it")
        return ckpt_path, None
    if ckpt_path == "auto" and not trainer.state.fitting:
        raise ConfigError(
            "ckpt_path='auto' is for fit: it resumes from the last checkpoint, or starts without one; give 'last' or 'best'"
        )
    if ckpt_path == "best":
        path = _from_rank_zero(trainer, ckpt_path, lambda: _best(trainer, weights_only))
        checkpoint = None
    else:
        path, checkpoint = _furthest(trainer, ckpt_path, weights_only)
    if not path and ckpt_path != "auto":
        raise MissingCheckpointError(f"ckpt_path={ckpt_path!r}: {_nothing_found(trainer, ckpt_path)}")
    return path or None, checkpoint


def _refuse_a_misspelt_word(trainer: Trainer, ckpt_path: str | None) -> None:
    """Raises :class:`CheckpointNotFoundError` if ``ckpt_path`` does not exist and looks like a misspelt keyword."""
    if ckpt_path is None or storage.is_remote(ckpt_path):
        return
    has_folder_or_suffix = Path(ckpt_path).name != ckpt_path or Path(ckpt_path).suffix != ""
    if has_folder_or_suffix:
        return
    words = _WORDS if trainer.state.fitting else _EVALUATED
    if (hint := nearest(ckpt_path, words)) and not storage.exists(ckpt_path):
        raise CheckpointNotFoundError(f"ckpt_path={ckpt_path!r} is not there{hint}", ckpt_path)


def _furthest(trainer: Trainer, word: str, weights_only: bool | None) -> tuple[str, StateDict | None]:
    """Returns the furthest checkpoint that every rank can read, and its content; all ranks skip a file that one rank cannot."""
    candidates = _candidates(trainer, weights_only)
    while path := _from_rank_zero(trainer, word, candidates.next_path):
        try:
            return path, read_together(path, trainer.strategy, weights_only=weights_only)
        except CheckpointObjectsError as error:  # not damaged, so an older file would lose steps
            raise reworded(error, f"ckpt_path={word!r}: {error}") from None
        except CheckpointError as error:
            if trainer.is_global_zero:
                candidates.skip(str(error))
    return "", None


def _candidates(trainer: Trainer, weights_only: bool | None) -> Candidates:
    """Returns this run's files, then those of each folder that may belong to an earlier attempt, newest run first."""
    callbacks = model_checkpoints(trainer)
    io = trainer.strategy.checkpoint_io

    def groups() -> Iterator[list[str]]:
        # A given dirpath is the same in every attempt, so its files are candidates together with the known ones.
        elsewhere = not writes_own_files(io)  # only the plug-in knows whether a file exists
        known = [path for callback in callbacks for path in callback.known_files()]
        first = [path for path in known if elsewhere or storage.exists(path)]
        for callback in callbacks:
            first += callback.found_last_checkpoints(trainer)
            if callback.dirpath_given:
                for folder in possible_folders(trainer, callback):
                    first += listed(callback, folder)
        yield first
        for callback in callbacks:
            if not callback.dirpath_given:
                yield from (listed(callback, folder) for folder in possible_folders(trainer, callback))

    def listed(callback: ModelCheckpoint, folder: str) -> list[str]:
        try:
            return files_in(folder, callback)
        except OSError as error:
            where = error.filename or folder
            reason = error.strerror or error
            candidates.skip(f"{where} cannot be listed ({reason}), and there may be checkpoints in it")
            return []

    candidates = Candidates(groups(), training=trainer.state.fitting, io=io, weights_only=weights_only)
    return candidates


def _best(trainer: Trainer, weights_only: bool | None) -> str:
    """Returns the best file that this Trainer knows, else the best file named in the last checkpoint of an earlier process."""
    for callback in model_checkpoints(trainer):
        if callback.best_model_path:
            return callback.best_model_path
    last = _candidates(trainer, weights_only).next_path()
    io = trainer.strategy.checkpoint_io
    states = read_header(last, io, weights_only=weights_only).get("callbacks") if last else None
    if not isinstance(states, dict):
        return ""
    for callback, state in matched_states(model_checkpoints(trainer), states):
        best = state.get("best_model_path") if isinstance(state, dict) else ""
        if not best:
            continue
        best = str(best)
        # A checkpoint may name any file; only those in folders of this run are accepted.
        folders = trusted_folders(trainer, callback, last)
        is_checkpoint = best.endswith(callback.FILE_EXTENSION)
        any_folder = not writes_own_files(io)
        if is_checkpoint and any(storage.resolves_within(best, folder, any_folder=any_folder) for folder in folders):
            return best
        raise CheckpointError(
            f"{last} names {best} as the best, which is not a {callback.FILE_EXTENSION} file in {' or '.join(folders)}; give "
            "its path"
        )
    return ""


def _from_rank_zero(trainer: Trainer, word: str, choose: Callable[[], str]) -> str:
    """Returns the file that ``choose`` returns on rank 0; every rank raises rank 0's error."""

    def chosen() -> str:
        try:
            return choose()
        except FabricampError as error:
            family = CheckpointObjectsError if isinstance(error, CheckpointObjectsError) else CheckpointError
            raise family(f"ckpt_path={word!r}: {error}") from None

    return trainer.strategy.on_rank_zero(chosen)


def _nothing_found(trainer: Trainer, word: str) -> str:
    callbacks = model_checkpoints(trainer)
    if callbacks:
        folders = dict.fromkeys(folder for callback in callbacks for folder in possible_folders(trainer, callback))
        looked = ", ".join(folders) or "no folder"
        missing = f"no ModelCheckpoint of this Trainer has saved one yet (looked in: {looked})"
    else:
        missing = "this Trainer has no ModelCheckpoint"
    return f"{missing}; give a path" + (", or ckpt_path='auto' to start where there is none" if word == "last" else "")


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
        why = f"{type(callback).__name__} has saved no best checkpoint"
    raise MissingCheckpointError(
        f"trainer.{entry_point}() without a module loads the best checkpoint of the last fit, and there is none: {why}; pass the "
        f"module to take its weights as they are, trainer.{entry_point}(module), or name a file, ckpt_path='last' or a path"
    )


def model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Returns every ModelCheckpoint of the Trainer; they know which files exist and which one is the best."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
