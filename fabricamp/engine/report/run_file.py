"""``run.json`` in a run's folder: the run's command, settings and machine, and how it ended.

An evaluation writes its own, smaller file: ``run_test.json`` and so on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp._utils.files import replace_text
from fabricamp._utils.masking import hidden, masked
from fabricamp.checkpoint import plain
from fabricamp.engine.logger_setup import kept_of
from fabricamp.engine.report import environment_info
from fabricamp.engine.saved.ckpt_path import model_checkpoints
from fabricamp.loggers.run_folder import RunFolderLogger, folder_of
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fabricamp._utils.types import StateDict
    from fabricamp.engine.report.run_summary import RunSummary
    from fabricamp.engine.session import Session
    from fabricamp.loggers.base import Logger
    from fabricamp.state import RunState
    from fabricamp.trainer import Trainer
    from fabricamp.watchdog import StopAgreement

NAME = "run.json"
EVALUATIONS = {fn.value: f"run_{fn}.json" for fn in TrainerFn if fn is not TrainerFn.FITTING}
"""The file of an evaluation by its function: ``validate``, ``test`` or ``predict``."""
_LOG = logging.getLogger("fabricamp")


class EarlyRecord:
    """The file of a fit before its loop, so that a run that is killed while it builds its data or its model is listed.

    The record of an earlier fit in the folder stays: this one has changed nothing.
    """

    def __init__(self, session: Session) -> None:
        folder = folder_to_record_in(session.trainer)
        self.folder: Path | None = None
        """The folder that has the file; None: there is none, or it is the loop's by now."""
        if folder is None or (folder / NAME).exists():
            return
        self._makes_folder = not folder.exists()
        self._loggers = session.trainer.loggers
        with contextlib.suppress(Exception):  # the loop's file comes to the same, and tells of it
            _write(session.trainer, folder, {**_start(session, folder), "module": _name_of(session.module)})
            self.folder = folder

    def gives_way_in(self, folder: Path) -> bool:
        """Leaves the file to the loop, which replaces it in ``folder``; False if it is not there."""
        is_there = self.folder == folder
        if is_there:
            self.folder = None
        self.withdraw()
        return is_there

    def take_back(self, folder: Path) -> None:
        """Removes the file that the loop has made of this one, as :meth:`withdraw` does."""
        self.folder = folder
        self.withdraw()

    def withdraw(self) -> None:
        """Removes the file, and the folder that was made for it, unless there is more in it; does nothing in a second call."""
        folder, self.folder = self.folder, None
        if folder is None:
            return
        _write_what_waits(self._loggers)  # a thread that is about to write needs the folder
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
            if self._makes_folder:
                folder.rmdir()


@contextlib.contextmanager
def recorded(session: Session) -> Iterator[None]:
    """A context around a fit's loop: writes the file before the loop, and how the run ended after it.

    Only on rank 0, and only if a logger has a folder.  A fit that had nothing left to train, and wrote nothing, leaves no file.
    """
    folder = folder_to_record_in(session.trainer)
    early = session.early_record
    if folder is None or (session.is_over and (early is None or early.folder != folder)):  # an earlier fit's file stays
        yield
        return
    content: StateDict = {}
    first = session.state.batches_done
    with _never_an_error():
        beginning = _beginning(session, folder)
        is_own = early is not None and early.gives_way_in(folder)
        file = folder / NAME
        if file.exists() and not is_own:  # of an earlier fit in this folder
            number = 1 + sum(1 for _ in folder.glob("run-*.json"))
            file.rename(folder / f"run-{number}.json")
        _write(session.trainer, folder, beginning)
        content = beginning
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        with _never_an_error():
            if content and early is not None and _is_empty(session, folder, first):
                early.take_back(folder)
            elif content:
                status = _status(session.state, session.agreement, error)
                _write(session.trainer, folder, {**content, **_end(session.trainer, session.run_summary, *status)})


def _is_empty(session: Session, folder: Path, first: int) -> bool:
    """Returns whether a fit that had nothing left to train has written nothing into its folder but its file."""
    if not session.is_over or session.state.batches_done != first:
        return False
    _write_what_waits(session.trainer.loggers)
    return [one.name for one in folder.iterdir()] == [NAME]


def _write_what_waits(loggers: Iterable[Logger]) -> None:
    """Lets loggers with a folder write what hooks have logged, which may wait in memory."""
    for logger in loggers:
        if isinstance(logger, RunFolderLogger):
            logger.save()


def record_early_failure(session: Session, folder: Path | None, error: BaseException) -> None:
    """Writes the file of a fit that failed before its loop, whose loggers are closed, if it left files in ``folder``.

    The record of an earlier fit there stays: this one has changed nothing.
    """
    if session.fn is not TrainerFn.FITTING or folder is None or not folder.is_dir() or (folder / NAME).exists():
        return
    with _never_an_error():
        status = _status(session.state, session.agreement, error)
        ending = _end(session.trainer, session.run_summary, *status)
        _write(session.trainer, folder, {**_beginning(session, folder), **ending})


def recorded_evaluation(session: Session, options: Mapping[str, bool]) -> Any:
    """Runs ``session.evaluate`` and returns its result; writes how it ended, if it has a log folder: it makes none."""
    started = _now()
    result: Any = None
    error: BaseException | None = None
    try:
        result = session.evaluate(**options)
    except BaseException as raised:
        error = raised
        raise
    finally:
        with _never_an_error():
            folder = folder_to_record_in(session.trainer)
            if folder is not None and folder.is_dir():
                status = _status(session.state, session.agreement, error)
                content = _evaluation(session.trainer, session.fn, folder, result, *status)
                _write(session.trainer, folder, {"started": started, **content}, EVALUATIONS[session.fn])
    return result


def process_start(pid: int) -> str:
    """Returns when a process of this machine started, as the kernel writes it (clock ticks since boot); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@contextlib.contextmanager
def _never_an_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a run must not fail for its description
        _LOG.warning("%s is not written: %s", NAME, error)


def folder_to_record_in(trainer: Trainer) -> Path | None:
    """Returns the first logger's folder on rank 0, otherwise None."""
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return None
    return next(iter(_log_folders(trainer)), None)


def _log_folders(trainer: Trainer) -> list[Path]:
    return list(dict.fromkeys(Path(folder) for one in trainer.loggers if (folder := folder_of(one))))


def _others(trainer: Trainer, folder: Path) -> list[str]:
    """Returns the other loggers' folders, as seen from the first one's."""
    return [os.path.relpath(one, folder) for one in _log_folders(trainer) if one != folder]


def _write(trainer: Trainer, folder: Path, content: StateDict, name: str = NAME) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    private = any(logger.private for logger in trainer.loggers)
    text = json.dumps(_as_json(content), indent=1, ensure_ascii=False, allow_nan=False)
    replace_text(folder / name, text + "\n", private=private)


def _start(session: Session, folder: Path) -> StateDict:
    """Returns what is known before anything of the run is built."""
    return {
        "status": "running",
        "started": _now(),
        "command": masked(sys.orig_argv),
        "folder": str(Path.cwd()),
        "other_log_folders": _others(session.trainer, folder),
        "process": {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start(os.getpid())},
    }


def _beginning(session: Session, folder: Path) -> StateDict:
    trainer = session.trainer
    module = session.module
    hyperparameters: dict[str, Any] = {}
    for _, kept in kept_of(module, session.source.datamodule):
        if kept.logged and session.settings.enable_autolog_hparams:
            hyperparameters |= plain(kept.values, private=kept.private)
    return {
        **_start(session, folder),
        "first_step": trainer.state.global_step,
        "ckpt_path": hidden(trainer.ckpt_path),
        "resumes": _resumed_run(trainer.ckpt_path, folder),
        "trainer": {
            "strategy": session.strategy.name,
            "precision": session.precision.name,
            "device": str(session.strategy.device),
            "processes": trainer.world_size,
            **dataclasses.asdict(session.settings),
            "callbacks": [type(one).__name__ for one in trainer.callbacks],
            "loggers": [type(one).__name__ for one in trainer.loggers],
        },
        "monitors": list(dict.fromkeys(one.monitor for one in model_checkpoints(trainer) if one.monitor is not None)),
        "module": _name_of(module),
        "data": None if session.source.datamodule is None else _name_of(session.source.datamodule),
        "hyperparameters": hidden(hyperparameters),
        "machine": environment_info.machine(session.strategy.device),
        "python": sys.version.split()[0],
        "packages": environment_info.packages(),
        "git": environment_info.code_of(module),
    }


def _end(trainer: Trainer, run_summary: RunSummary, status: str, reason: str) -> StateDict:
    state = trainer.state
    best = {
        callback.monitor: float(callback.best_model_score)
        for callback in model_checkpoints(trainer)
        if callback.monitor is not None and callback.best_model_score is not None
    }
    return {
        "status": status,
        "reason": reason or run_summary.reason(),
        "ended": _now(),
        "step": state.global_step,
        "epoch": state.epoch,
        "best": best,
    }


def _evaluation(trainer: Trainer, fn: TrainerFn, folder: Path, result: Any, status: str, reason: str) -> StateDict:
    ckpt_path = trainer.ckpt_path
    metrics = [] if fn is TrainerFn.PREDICTING else result or []
    return {
        "fn": fn.value,
        "status": status,
        "reason": reason,
        "ended": _now(),
        "command": masked(sys.orig_argv),
        "folder": str(Path.cwd()),
        "other_log_folders": _others(trainer, folder),
        "ckpt_path": hidden(ckpt_path),
        "run": _run_of(ckpt_path, folder),
        "metrics": {name: value for of_loader in metrics for name, value in of_loader.items()},
    }


def _run_of(checkpoint: str | None, seen_from: Path) -> str | None:
    """Returns the folder of the run that wrote a checkpoint, as seen from another: the first above it that has a ``run.json``."""
    above = () if checkpoint is None else Path(checkpoint).absolute().parents
    run = next((folder for folder in above if (folder / NAME).is_file()), None)
    return None if run is None else os.path.relpath(run, seen_from)


def _resumed_run(checkpoint: str | None, folder: Path) -> str | None:
    """Returns the folder of the run that this one goes on with, as seen from its own; None within one folder."""
    run = _run_of(checkpoint, folder)
    return None if run == "." else run


def _status(state: RunState, agreement: StopAgreement, error: BaseException | None) -> tuple[str, str]:
    """Returns the status and its reason; no reason if the function came to its end."""
    interruption = state.stop_request.interruption
    if agreement.abandoned and not interruption:
        interruption = agreement.reason
    if interruption or isinstance(error, KeyboardInterrupt):
        return "interrupted", interruption or "interrupted"
    if error is not None:
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return "finished", ""


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _as_json(value: object) -> Any:
    """Returns ``value`` in types that JSON has; the ``str`` of values that JSON cannot express."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    return str(value)
