"""Logs loss scale and skipped steps of mixed precision, and reads and writes apex's checkpoint files."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint import apex_scales, read_together, write_checkpoint
from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.precision import Precision
    from fabricamp.precision.step_results import StepResults
    from fabricamp.trainer import Trainer

logger = logging.getLogger("fabricamp")

_SECTIONS = ("weights", "optimizers", "precision")


class AmpState(Callback):
    """Logs ``amp/loss_scale``, ``amp/applied_steps`` and ``amp/skipped_steps`` every ``log_every_n_steps`` steps.

    The values are two steps old: the newest that the host knows without waiting.  For each series of overflows, one log line
    names a parameter whose gradient was not finite.

    :meth:`save` and :meth:`load` write and read the file of apex scripts, ``{'model', 'optimizer', 'amp'}``; call them in hooks
    from ``on_fit_start`` on, on every rank.  ``fit(ckpt_path=...)`` reads such a file too.

    Example:
        >>> amp_state = AmpState()  # Trainer(precision="O2", callbacks=amp_state); amp_state.save("amp_checkpoint.pt")
    """

    _trainer: Trainer | None = None
    _due: float = 0
    _skipped = 0
    _overflowed_at = -1

    def __getstate__(self) -> StateDict:
        """Returns the attributes without the reference to the current run."""
        return {**self.__dict__, "_trainer": None}

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Keeps a reference to the Trainer."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Starts to count overflows."""
        self._due = trainer.global_step + 1
        verdicts = trainer.precision_plugin.verdicts
        self._skipped = 0 if verdicts is None else verdicts.skipped_steps
        self._overflowed_at = -1

    def holds_at(self, global_step: int) -> float:
        """Returns inf: the status of each step in a launch is kept, so no launch has to end for it."""
        return math.inf

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Logs at the same steps as the Trainer, and reports new overflows."""
        step = trainer.global_step
        verdicts = trainer.precision_plugin.verdicts
        if verdicts is not None and verdicts.skipped_steps != self._skipped:
            self._report_overflow(verdicts, step, logs=trainer.is_global_zero)
        if step < self._due:
            return
        every = trainer.log_every_n_steps or math.inf
        self._due = (step // every + 1) * every
        if step % every == 0:
            self._log(trainer, step)

    def _report_overflow(self, verdicts: StepResults, step: int, *, logs: bool) -> None:
        """Logs, once per series of overflows, which gradients were not finite first; reads them from the device."""
        same_series = step - self._overflowed_at <= 1
        self._overflowed_at = step
        self._skipped = verdicts.skipped_steps
        inherited = getattr(verdicts, "known_is_inherited", False)  # the run before has reported it
        if logs and not inherited and not same_series and verdicts.policy in (None, "skip"):
            logger.warning("a step was skipped: %s", verdicts.explain(step))

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Logs the values at the last step."""
        self._log(trainer, trainer.global_step)

    def save(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Writes apex's file: weights of ``model`` in full precision, optimizer state and loss scale.

        ``model`` is the module (default) or one of its submodules.  Every rank calls this; raises :class:`CheckpointError` on every
        rank.
        """
        trainer = self._running("save")
        prefix = _prefix_of(trainer.module, model)
        state = trainer.record.save(*_SECTIONS)
        weights = state["state_dict"]
        optimizers = state["optimizer_states"]
        content = {
            "model": {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)},
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
            "amp": apex_scales(state["amp"]),
        }
        trainer.strategy.on_rank_zero(lambda: write_checkpoint(path, content))

    def load(self, path: str | Path) -> None:
        """Loads weights, optimizer state and loss scale from apex's file; every rank calls this."""
        trainer = self._running("load")
        checkpoint = read_together(str(path), trainer.strategy)
        if checkpoint.get("source") != "apex":
            raise CheckpointError(
                f"{path} is not an apex file with 'model', 'optimizer' and 'amp'; give it to fit(ckpt_path=...)"
            )
        trainer.record.restore(checkpoint, str(path), *_SECTIONS)

    def _running(self, name: str) -> Trainer:
        if self._trainer is None:
            raise ConfigError(f"AmpState.{name} needs a run: call it in a hook from on_fit_start on, or after fit")
        return self._trainer

    def _log(self, trainer: Trainer, step: int) -> None:
        if not trainer.is_global_zero:
            return
        skipped = trainer.skipped_steps
        empty = getattr(trainer.precision_plugin.verdicts, "empty_steps", 0)
        values = {
            "amp/loss_scale": _scale(trainer.precision_plugin),
            "amp/applied_steps": float(step - skipped - empty),
            "amp/skipped_steps": float(skipped),
        }
        trainer.delivery.log_metrics(values, max(step - 1, 0))


def _scale(precision: Precision) -> float:
    """Returns the newest loss scale that the host knows without waiting."""
    if precision.verdicts is not None:
        return precision.verdicts.scale
    return float(precision.state_dict().get("loss_scale", 1.0))


def _prefix_of(module: nn.Module, model: nn.Module | None) -> str:
    if model is None or model is module:
        return ""
    for name, child in module.named_modules():
        if child is model:
            return f"{name}."
    raise ConfigError(f"AmpState.save got a {type(model).__name__} that is not a submodule of {type(module).__name__}")
