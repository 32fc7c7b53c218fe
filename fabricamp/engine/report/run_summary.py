"""The lines that rank 0 logs on how a run begins and why it ended: one line each, all of them from here."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from fabricamp._utils.first_rank import STARTED_BY
from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.data import leaves_of
from fabricamp.data.position import keeps_workers
from fabricamp.engine.report.run_file import NAME
from fabricamp.engine.saved.ckpt_path import model_checkpoints
from fabricamp.loggers.run_folder import RunFolderLogger, folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp._utils.types import Loader
    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.session import Session
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

_FEW_ROWS = 5
"""With fewer logged steps a curve shows nothing of a run's course."""
_DEFAULT_INTERVAL = 50
"""The default of ``log_every_n_steps``."""

_STARTED = {"fork": "forked ", "spawn": "spawned "}
"""What the first line says of processes that a call started: ``"ddp_notebook"`` and ``"ddp_spawn"`` are ``ddp`` with these."""


class RunSummary:
    """Logs lines about one run; silent on other ranks, and if both progress bar and model summary are switched off."""

    def __init__(self, session: Session) -> None:
        self._trainer = session.trainer
        self._session = session
        self._first = session.trainer.state.batches_done
        self._speaks = session.trainer.is_global_zero and any(map(_shows, session.trainer.callbacks))
        self.is_trial = False
        """Whether the run is a trial of the Tuner, of which there are many."""
        self.is_best = False
        """Whether ``ckpt_path="best"`` was given."""

    @property
    def speaks_of_time(self) -> bool:
        """Whether lines tell where the time of this fit goes."""
        return self._speaks and not self.is_trial and not self._trainer.fast_dev_run

    def begin(self) -> None:
        """Logs what a fit runs on, where its files go, and what it resumes from."""
        self._first = self._trainer.state.batches_done
        self.say(*self._beginning())
        slowness = self._session.precision.slowness(compiled=self._session.compilation.compiles)
        if slowness and self._trainer.is_global_zero and not self.is_trial:
            # Logged even if bar and summary are switched off: nothing else would show it.
            _LOG.info(slowness)

    def workers(self, loader: Loader) -> None:
        """Logs which workers are started again in each epoch; called once the training ``loader`` has been asked for."""
        if self._session.settings.max_epochs != 1 and not self._trainer.fast_dev_run:
            self.say(*_workers_of(loader))

    def rows(self) -> None:
        """Logs that no step, or few of them, will be logged; called once the run's number of steps is known."""
        trainer = self._trainer
        every = self._session.settings.log_every_n_steps
        done = trainer.global_step
        end = trainer.estimated_stepping_batches
        if not trainer.loggers or trainer.fast_dev_run or not every or not done < end < math.inf:
            return
        steps = int(end) - done
        rows = int(end) // every - done // every
        if not trainer.is_global_zero:
            return
        # Logged even if bar and summary are switched off: whoever reads the logs later would look for the steps in vain.
        if rows == 0:
            _LOG.info(
                "log_every_n_steps=%d is more than the %s of this run: only values of epochs will be logged",
                every,
                "1 step" if steps == 1 else f"{steps} steps",
            )
        elif rows < _FEW_ROWS and every == _DEFAULT_INTERVAL:  # another interval was chosen by the user
            _LOG.info(
                "log_every_n_steps=%d logs %d of the %d steps of this run: log_every_n_steps=%d shows its course",
                every,
                rows,
                steps,
                10 if steps < 160 else 20,
            )

    def weights(self, *, chosen: bool) -> None:
        """Logs from which file an evaluation takes its weights, if from any; ``chosen``: the user did not name the file."""
        checkpoint = self._session.checkpoint
        if checkpoint is None:
            return
        line = f"Weights from {shown(self._trainer.ckpt_path)}"
        if checkpoint.get("global_step") is not None:
            line += f", step {checkpoint['global_step']}"
        first = next(iter(model_checkpoints(self._trainer)), None)
        has_monitor = first is None or first.monitor is not None
        if not chosen:
            self.say(
                line
                if has_monitor or not self.is_best
                else f"{line}: the newest, as {type(first).__name__} has no monitor"
            )
        elif self._trainer.is_global_zero:
            # Logged even if bar and summary are switched off: the module's weights are not those that its training ended with.
            name = self._session.fn.value
            which = "best" if has_monitor else "newest"
            _LOG.info("%s: the %s of the last fit (%s(module) or ckpt_path='last' takes others)", line, which, name)

    def end(self) -> None:
        """Logs why a fit ended, and its best checkpoint; the end of a ``fast_dev_run`` is known."""
        if not self._trainer.fast_dev_run:
            verdict = self._session.time_spent.verdict()
            if verdict and self.speaks_of_time:
                self.say(verdict if self._trainer.world_size == 1 else f"{verdict} (rank 0)")
            parts = (self._ending(), best_checkpoint(self._trainer))
            self.say("; ".join(part for part in parts if part))

    def _beginning(self) -> Iterator[str]:
        trainer = self._trainer
        settings = self._session.settings
        yield (f"{_machine(trainer)}, strategy {self._session.strategy.name}, precision {self._session.precision.name}")
        yield from self._session.precision.notes()
        if settings.performance is not None:
            yield settings.performance.line
        if settings.fast_dev_run:
            batches = "1 batch" if settings.fast_dev_run == 1 else f"{settings.fast_dev_run} batches"
            yield f"fast_dev_run: {batches} of each loader, without logs and checkpoints"
            return
        if not self._session.is_over:
            yield from _folders(trainer)
        if trainer.ckpt_path is None and not trainer.state.batches_done:
            yield from _logs_of_others(self._session)
        if settings.max_epochs_by_default:
            yield f"max_epochs was not given: {settings.max_epochs} epochs (-1 for no limit)"
        if trainer.ckpt_path is not None:
            epoch = trainer.state.epoch + 1
            last = settings.max_epochs
            position = f"epoch {epoch}" if last < 0 else f"epoch {min(epoch, last)}/{last}"
            yield f"Resumed from {shown(trainer.ckpt_path)}: {position}, step {trainer.state.global_step}"

    def reason(self) -> str:
        """Returns why the fit ended."""
        state = self._trainer.state
        settings = self._session.settings
        if self._session.data.num_training_batches == 0:
            return "limit_train_batches=0"
        if 0 <= settings.max_steps <= state.global_step:
            return f"max_steps={settings.max_steps} reached"
        if state.should_stop:
            return state.stop_request.reason
        return f"max_epochs={settings.max_epochs} reached"

    def _ending(self) -> str:
        state = self._trainer.state
        if self._session.data.num_training_batches == 0:
            return f"Nothing was trained: {self.reason()}"
        if state.batches_done == self._first:
            return f"Nothing left to train at step {state.global_step}: {self.reason()} already"
        return f"Ended at step {state.global_step}: {self.reason()}"

    def say_of_graph(self, line: str) -> None:
        """Logs why steps are not captured as CUDA graphs, also if bar and summary are switched off: nothing else would show it."""
        if self._trainer.is_global_zero and not self.is_trial:
            _LOG.info(line)

    def say(self, *lines: str) -> None:
        """Logs lines at level INFO, unless this run is silent."""
        if self._speaks:
            for line in lines:
                _LOG.info(line)


def _workers_of(loader: Loader) -> Iterator[str]:
    """Yields a line per torch DataLoader with workers that restart in each epoch, or persist because of ``per_sample_seed``."""
    for leaf in leaves_of(loader):
        if not isinstance(leaf, DataLoader) or leaf.num_workers == 0:
            continue
        pinned = ", and their batches are pinned" if leaf.pin_memory else ""
        workers = "1 worker" if leaf.num_workers == 1 else f"{leaf.num_workers} workers"
        if not leaf.persistent_workers:
            yield f"{workers} of the train loader: started anew in each epoch (persistent_workers=True keeps them){pinned}"
        elif keeps_workers(leaf):
            yield f"{workers} of the train loader: kept over the epochs (per_sample_seed), with the dataset as it is now{pinned}"


def _shows(callback: Callback) -> bool:
    """Whether ``callback`` is a model summary, or a progress bar that is switched on."""
    return isinstance(callback, ModelSummary) or (isinstance(callback, ProgressBar) and callback.is_enabled)


def shown(path: str | Path | None) -> str:
    """Returns the path as a user would type it in the current folder."""
    return str(path).removeprefix(str(Path.cwd()) + os.sep)


def best_checkpoint(trainer: Trainer) -> str:
    """Names the best checkpoint with its score, or the newest one if nothing is monitored."""
    callback = next(iter(model_checkpoints(trainer)), None)
    if callback is None or not callback.best_model_path:
        return ""
    score = callback.best_model_score
    if callback.monitor is None or score is None:
        return f"checkpoint: {shown(callback.best_model_path)}"
    return f"best checkpoint ({callback.monitor} {float(score):.4g}): {shown(callback.best_model_path)}"


def _machine(trainer: Trainer) -> str:
    device = trainer.strategy.device
    count = trainer.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    started = _STARTED.get(os.environ.get(STARTED_BY, ""), "")
    processes = "1 process" if count == 1 else f"{count} {started}processes"
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{name}, {processes}{nodes}"


def _folders(trainer: Trainer) -> Iterator[str]:
    """Yields all folders of logs and checkpoints: one line for a logger's folder that the checkpoints are within."""
    logs = list(dict.fromkeys(folder for logger in trainer.loggers if (folder := folder_of(logger))))
    checkpoints = list(dict.fromkeys(one.dirpath for one in model_checkpoints(trainer) if one.dirpath))
    shared = next((folder for folder in logs if all(f"{one}/".startswith(f"{folder}/") for one in checkpoints)), None)
    if checkpoints and shared is not None:
        yield f"Logs and checkpoints: {shown(shared)}"
        logs.remove(shared)
        checkpoints = []
    for what, folders in (("Logs", logs), ("Checkpoints", checkpoints)):
        if folders:
            yield f"{what}: {', '.join(map(shown, folders))}"


def _logs_of_others(session: Session) -> Iterator[str]:
    """Yields a line for each folder into which an earlier run has logged: both runs' values then share files and curves."""
    folders = dict.fromkeys(logger.folder for logger in session.trainer.loggers if isinstance(logger, RunFolderLogger))
    early = session.early_record
    own = None if early is None else early.folder
    for folder in (folder for folder in folders if folder != own and (folder / NAME).is_file()):
        yield f"An earlier run has logged into {shown(folder)}: new values follow its own; another name or version keeps runs apart"
