"""What ``ckpt_path="last"``, ``"best"`` and ``"auto"`` stand for: found by rank 0, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.checkpoint import choose_checkpoint, places, read_header
from fabricamp.errors import CheckpointError, ConfigError, FabricampError
from fabricamp.loggers.run_folder import RunFolderLogger
from fabricamp.state import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.trainer import Trainer

__all__ = ["resolve_checkpoint"]

_WORDS = ("auto", "best", "last")


def resolve_checkpoint(trainer: Trainer, ckpt_path: str | None) -> str | None:
    """Returns the file to load, or None for none; every rank calls it and gets rank 0's answer.

    "last" is the furthest whole checkpoint of this run (or of the runs before it, where their folders are beside this one's);
    "auto" the same, or None where there is none; "best" what the first ModelCheckpoint holds to be the best.  A path stays
    what it is.  Raises :class:`CheckpointError` where nothing is found, or nothing that can be read.
    """
    if ckpt_path not in _WORDS:
        return ckpt_path
    if ckpt_path == "auto" and trainer.state.stage is not Stage.FIT:
        raise ConfigError(
            "ckpt_path='auto' is for fit: it goes on from the last checkpoint, or starts; give 'last' or 'best'"
        )
    found, problem = "", ""
    if trainer.is_global_zero:
        try:
            found = _best(trainer) if ckpt_path == "best" else _last(trainer)
        except FabricampError as error:
            problem = str(error)
    found, problem = trainer.strategy.broadcast((found, problem))
    if not found and not problem and ckpt_path != "auto":
        looked = ", ".join(
            dict.fromkeys(folder for one in trainer.checkpoint_callbacks for folder in _folders(trainer, one))
        )
        problem = (
            (
                f"no ModelCheckpoint of this Trainer has saved one yet (looked in: {looked or 'no folder'})"
                if trainer.checkpoint_callbacks
                else "this Trainer has no ModelCheckpoint"
            )
            + "; give a path"
            + (", or ckpt_path='auto' to start where there is none" if ckpt_path == "last" else "")
        )
    if problem:
        raise CheckpointError(f"ckpt_path={ckpt_path!r}: {problem}")
    return found or None


def _last(trainer: Trainer) -> str:
    """The furthest one: of this run's files, then of each folder that may hold an earlier attempt's, the newest run first."""
    callbacks = trainer.checkpoint_callbacks
    known = [path for one in callbacks for path in one.known_files() if places.exists(path)]
    groups = [
        known,
        *(_files(one, folder) for one in callbacks if one.dirpath_given for folder in _folders(trainer, one)),
    ]
    merged = [[path for group in groups for path in group]]
    merged += [_files(one, folder) for one in callbacks if not one.dirpath_given for folder in _folders(trainer, one)]
    return choose_checkpoint(merged, training=trainer.state.stage is Stage.FIT)


def _best(trainer: Trainer) -> str:
    """What this Trainer knows, or what the last checkpoint of an earlier process knew."""
    for callback in trainer.checkpoint_callbacks:
        if callback.best_model_path:
            return callback.best_model_path
    last = _last(trainer)
    states = read_header(last).get("callbacks") if last else None
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key) if isinstance(states, dict) else None
        if isinstance(state, dict) and state.get("best_model_path"):
            return str(state["best_model_path"])
    return ""


def _files(callback: ModelCheckpoint, folder: str) -> list[str]:
    return places.files_in(folder, callback.FILE_EXTENSION, (callback.filename or "").count("/"))


def _folders(trainer: Trainer, callback: ModelCheckpoint) -> Iterator[str]:
    """Where a ModelCheckpoint of this Trainer writes, or would have written in the runs before this one."""
    if callback.dirpath_given:
        yield callback.dirpath or ""
        return
    for logger in trainer.loggers:
        if isinstance(logger, RunFolderLogger):
            for folder in logger.run_folders():
                yield places.join(str(folder), "checkpoints")
    yield places.join(places.normal(trainer.default_root_dir), "checkpoints")
