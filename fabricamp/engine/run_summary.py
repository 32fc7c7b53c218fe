"""The lines that rank 0 logs on how a run begins and why it ended: one line each, all of them from here."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.data import leaves_of
from fabricamp.data.position import keeps_workers
from fabricamp.engine.ckpt_path import model_checkpoints
from fabricamp.engine.run_file import NAME
from fabricamp.loggers.run_folder import RunFolderLogger, folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.session import Session
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")


class RunSummary:
    """Logs lines about one run; silent on other ranks, and if both progress bar and model summary are switched off."""

    def __init__(self, session: Session) -> None:
        self._trainer = session.trainer
        self._session = session
        self._first = session.trainer.state.batches_done
        self._speaks = session.trainer.is_global_zero and any(map(_shows, session.trainer.callbacks))

    def begin(self) -> None:
        """Logs what a fit runs on, where its files go, and what it resumes from."""
        self._first = self._trainer.state.batches_done
        self.say(*self._beginning())

    def workers(self, loader: Any) -> None:
        """Logs which workers are started again in each epoch; called once the training ``loader`` has been asked for."""
        if self._session.settings.max_epochs != 1 and not self._trainer.fast_dev_run:
            self.say(*_workers_of(loader))

    def rows(self) -> None:
        """Logs that no step will be logged, if the run ends before its first flush; called once its number of steps is known."""
        trainer, every = self._trainer, self._session.settings.log_every_n_steps
        done, end = trainer.global_step, trainer.estimated_stepping_batches
        if not trainer.loggers or trainer.fast_dev_run or not every or not done < end < (done // every + 1) * every:
            return
        steps = "1 step" if end - done == 1 else f"{end - done:.0f} steps"
        if trainer.is_global_zero:
            # Logged even if bar and summary are switched off: whoever reads the logs later would look for the steps in vain.
            _LOG.info(
                "log_every_n_steps=%d is more than the %s of this run: only values of epochs will be logged",
                every,
                steps,
            )

    def weights(self, *, chosen: bool) -> None:
        """Logs from which file an evaluation takes its weights, if from any; ``chosen``: the user did not name the file."""
        checkpoint = self._session.checkpoint
        if checkpoint is None:
            return
        step = checkpoint.get("global_step")
        line = f"Weights from {shown(self._trainer.ckpt_path)}" + ("" if step is None else f", step {step}")
        if not chosen:
            self.say(line)
        elif self._trainer.is_global_zero:
            # Logged even if bar and summary are switched off: the module's weights are not those that its training ended with.
            name = self._session.fn.value
            _LOG.info("%s: the best of the last fit (%s(module) or ckpt_path='last' takes others)", line, name)

    def end(self) -> None:
        """Logs why a fit ended, and its best checkpoint; the end of a ``fast_dev_run`` is known."""
        if not self._trainer.fast_dev_run:
            self.say("; ".join(part for part in (self._ending(), best_checkpoint(self._trainer)) if part))

    def _beginning(self) -> Iterator[str]:
        trainer, settings = self._trainer, self._session.settings
        parts = f"strategy {self._session.strategy.name}, precision {self._session.precision.name}"
        yield f"{_machine(trainer)}, {parts}"
        if settings.performance is not None:
            yield settings.performance.line
        if settings.fast_dev_run:
            batches = "1 batch" if settings.fast_dev_run == 1 else f"{settings.fast_dev_run} batches"
            yield f"fast_dev_run: {batches} of each loader, without logs and checkpoints"
            return
        yield from _folders(trainer)
        if trainer.ckpt_path is None and not trainer.state.batches_done:
            yield from _logs_of_others(trainer)
        if settings.max_epochs_by_default:
            yield f"max_epochs was not given: {settings.max_epochs} epochs (-1 for no limit)"
        if trainer.ckpt_path is not None:
            epoch, last = trainer.state.epoch + 1, settings.max_epochs
            place = f"epoch {epoch}" if last < 0 else f"epoch {min(epoch, last)}/{last}"
            yield f"Resumed from {shown(trainer.ckpt_path)}: {place}, step {trainer.state.global_step}"

    def reason(self) -> str:
        """Returns why the fit ended."""
        state, settings = self._trainer.state, self._session.settings
        if self._session.data.num_training_batches == 0:
            return "limit_train_batches=0"
        if state.global_step >= settings.max_steps >= 0:
            return f"max_steps={settings.max_steps} reached"
        if state.should_stop:
            return state.stop_reason
        return f"max_epochs={settings.max_epochs} reached"

    def _ending(self) -> str:
        state = self._trainer.state
        if self._session.data.num_training_batches == 0:
            return f"Nothing was trained: {self.reason()}"
        if state.batches_done == self._first:
            return f"Nothing left to train at step {state.global_step}: {self.reason()} already"
        return f"Ended at step {state.global_step}: {self.reason()}"

    def say(self, *lines: str) -> None:
        """Logs lines at level INFO, unless this run is silent."""
        for line in lines if self._speaks else ():
            _LOG.info(line)


def _workers_of(loader: Any) -> Iterator[str]:
    """Yields a line for each of torch's loaders whose workers do not stay, or stay because of ``per_sample_seed``."""
    for one in leaves_of(loader):
        if not isinstance(one, DataLoader) or one.num_workers == 0:
            continue
        pinned = ", and their batches are pinned" if one.pin_memory else ""
        workers = "1 worker" if one.num_workers == 1 else f"{one.num_workers} workers"
        if not one.persistent_workers:
            yield f"{workers} of the train loader: started anew in each epoch (persistent_workers=True keeps them){pinned}"
        elif keeps_workers(one):
            yield f"{workers} of the train loader: kept over the epochs (per_sample_seed), with the dataset as it is now{pinned}"


def _shows(callback: Callback) -> bool:
    """Whether ``callback`` is a model summary, or a progress bar that is switched on."""
    return isinstance(callback, ModelSummary) or (isinstance(callback, ProgressBar) and callback.is_enabled)


def shown(path: str | Path | None) -> str:
    """Returns the path as a user would type it in the current folder."""
    return str(path).removeprefix(str(Path.cwd()) + os.sep)


def best_checkpoint(trainer: Trainer) -> str:
    """Names the best checkpoint with its score, or the newest one if nothing is monitored."""
    callback = trainer.checkpoint_callback
    if callback is None or not callback.best_model_path:
        return ""
    score = callback.best_model_score
    if callback.monitor is None or score is None:
        return f"checkpoint: {shown(callback.best_model_path)}"
    return f"best checkpoint ({callback.monitor} {float(score):.4g}): {shown(callback.best_model_path)}"


def _machine(trainer: Trainer) -> str:
    device, count = trainer.strategy.device, trainer.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    processes = "1 process" if count == 1 else f"{count} processes"
    return f"{name}, {processes}" + (f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else "")


def _folders(trainer: Trainer) -> Iterator[str]:
    """Yields where logs and checkpoints go: one line if the checkpoints are within the logs' folder."""
    logs = next((folder for one in trainer.loggers if (folder := folder_of(one))), "")
    saving = next((one.dirpath for one in model_checkpoints(trainer) if one.dirpath), "")
    if logs and saving.startswith(logs):
        yield f"Logs and checkpoints: {shown(logs)}"
        return
    yield from (f"{what}: {shown(folder)}" for what, folder in (("Logs", logs), ("Checkpoints", saving)) if folder)


def _logs_of_others(trainer: Trainer) -> Iterator[str]:
    """Yields a line for each folder into which an earlier run has logged: the values of both share files and curves."""
    folders = (one.folder for one in trainer.loggers if isinstance(one, RunFolderLogger))
    for folder in dict.fromkeys(one for one in folders if (one / NAME).is_file()):
        yield f"An earlier run has logged into {shown(folder)}: new values follow its own; another name or version keeps runs apart"
