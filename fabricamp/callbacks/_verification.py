"""A fit under ``fabricamp verify``: writes digests of its state after each batch, and kills its process at a given batch.

The command (``runs/verify.py``) passes its plan in one environment variable, which a fit reads in one call: :func:`take_part`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.callbacks.base import Callback
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.loggers.dummy import DummyLogger
from fabricamp.ops.shards import local
from fabricamp.rng import capture_rng

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp._utils.types import Batch, Output, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer
    from fabricamp.trainer.arguments import Settings

VARIABLE = "FABRICAMP_VERIFY"
START, DONE = "start", "done"
_SECTIONS = ("weights", "optimizers", "learning-rate schedules", "precision")
_STATE = ("state_dict", "optimizer_states", "lr_schedulers", "amp")
_OF_OWN_RANK = ("first_loss", "loss", "ring")
"""Entries of a loss scaler about the losses of its own rank: a resumed run has rank 0's values on all ranks."""


class VerificationPlan(NamedTuple):
    """What one fit has to do; a position is a batch, as ``epoch/batch``, or empty."""

    folder: str
    """The folder of the digests and the checkpoint."""
    batches: int
    """The number of batches after which the fit ends."""
    save_at: str = ""
    kill_at: str = ""
    resume_from: str = ""


def take_part(trainer: Trainer, settings: Settings, ckpt_path: str | Path | None) -> str | Path | None:
    """Prepares a fit under the command, and returns the checkpoint from which it resumes; without the command ``ckpt_path``.

    Removes its loggers and checkpoint callbacks, and adds a :class:`Recorder`.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return ckpt_path
    plan = VerificationPlan(**json.loads(text))
    settings.cuda_graph = settings.cuda_graph and settings.cuda_graph.one_by_one()
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, Checkpoint)]
    trainer.callbacks.append(Recorder(plan))
    return plan.resume_from or ckpt_path


class Recorder(Callback):
    """Writes a line of digests for each batch, and kills its process at the end of the plan."""

    def __init__(self, plan: VerificationPlan) -> None:
        self._plan = plan
        self._before: StateDict = {}
        self._batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the state that the fit begins with; a resumed fit begins with that of its checkpoint."""
        self._write(trainer, {"at": START, "state": digests_of_state(trainer)})

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, batch_idx: int) -> None:
        """Keeps the digests of the batch, and of the RNG states before it."""
        self._before = {"data": digests(batch, "batch"), "rng": digests(capture_rng(), "random")}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Output, batch: Batch, batch_idx: int
    ) -> None:
        """Writes the digests of the batch and of the state after it; saves, or ends the run, at the plan's batches."""
        self._batches += 1
        position = f"{trainer.current_epoch}/{batch_idx}"
        self._write(
            trainer, {"at": position, "step": trainer.global_step, **self._before, "state": digests_of_state(trainer)}
        )
        if position == self._plan.save_at:
            trainer.save_checkpoint(Path(self._plan.folder) / "saved.ckpt")
        if position == self._plan.kill_at or self._batches == self._plan.batches:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Ends the process: what the script does after the fit is not verified."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        self._write(trainer, {"at": DONE})
        trainer.strategy.barrier("verified")  # a rank that exits would end others that are not here yet
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, trainer: Trainer, line: dict[str, Any]) -> None:
        with (Path(self._plan.folder) / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def digests_of_state(trainer: Trainer) -> dict[str, str]:
    """Returns digests, by name, of a checkpoint's weights, optimizers, schedules and loss scale; every rank has to call it."""
    saved = trainer.record.save(*_SECTIONS)
    state: dict[str, str] = {}
    for key in _STATE:
        state |= digests(saved.get(key), key)
    if trainer.is_global_zero:
        return state
    return {
        name: digest
        for name, digest in state.items()
        if not (name.startswith("amp.") and name.rpartition(".")[2] in _OF_OWN_RANK)
    }


def digests(value: object, name: str) -> dict[str, str]:
    """Returns digests, by name, of the tensors, numbers and texts in ``value``."""
    return {path: hashlib.blake2b(content, digest_size=8).hexdigest() for path, content in _contents(value, name)}


def _contents(value: object, name: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, torch.Tensor):
        flat = local(value.detach()).cpu().contiguous().flatten()
        yield name, f"{value.dtype} {tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _contents(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _contents(inner, f"{name}.{number}")
    elif isinstance(value, bytes | str | int | float | None):
        yield name, repr(value).encode()
    else:  # its repr may hold an address
        yield name, type(value).__qualname__.encode()
