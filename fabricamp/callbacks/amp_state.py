"""Shows what mixed precision does, and reads and writes apex's checkpoint files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint import apex_scales, fit_names, fitting, read_checkpoint, write_checkpoint
from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

__all__ = ["AmpState"]

logger = logging.getLogger("fabricamp")


class AmpState(Callback):
    """Logs ``amp/loss_scale``, ``amp/applied_steps`` and ``amp/skipped_steps`` every ``log_every_n_steps`` steps.

    The values are those that the host knows without waiting: as of two steps before.  Each run of overflows is told of in one
    line of the log that names a parameter whose gradient was not finite.

    :meth:`save` and :meth:`load` write and read the file of apex scripts, ``{'model', 'optimizer', 'amp'}``; they can be
    called in hooks from ``on_fit_start`` on, on every rank.  ``fit(ckpt_path=...)`` reads such a file too.

    Example:
        >>> amp_state = AmpState()  # Trainer(precision="O2", callbacks=amp_state); amp_state.save("amp_checkpoint.pt")
    """

    _trainer: Trainer | None = None
    _due = 0
    _skipped = 0
    _overflowed_at = -1

    def __getstate__(self) -> dict[str, Any]:
        """All but the run that it is in."""
        return {**self.__dict__, "_trainer": None}

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Takes note of the run."""
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Counts overflows from here on."""
        self._due = trainer.global_step + 1
        self._skipped, self._overflowed_at = trainer.precision.skipped_steps, -1

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs with the Trainer's own values."""
        step = trainer.global_step
        if trainer.precision.skipped_steps != self._skipped:
            self._tell_of_overflow(trainer, step)
        if step < self._due:
            return
        every = trainer.log_every_n_steps
        self._due = (step // every + 1) * every
        if step % every == 0:
            self._log(trainer, step)

    def _tell_of_overflow(self, trainer: Trainer, step: int) -> None:
        """Says once of several overflows in a row whose gradients they began with; reads them from the device."""
        goes_on, self._overflowed_at = step - self._overflowed_at <= 1, step
        self._skipped = trainer.precision.skipped_steps
        if trainer.is_global_zero and not goes_on and trainer.precision.nan_policy in (None, "skip"):
            logger.warning("fabricamp: a step was skipped: %s", trainer.precision.explain(step))

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Logs where training ended."""
        self._log(trainer, trainer.global_step)

    def save(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Writes apex's file: the weights of ``model`` (the module, or one of its submodules) in full precision, the rest.

        Every rank calls it; raises :class:`CheckpointError` on every rank.
        """
        trainer = self._running("save")
        whole = trainer.precision.module_state(trainer.module, trainer.strategy.module_state(trainer.module))
        prefix = _prefix_of(trainer.module, model)
        optimizers = [one.state_dict() for one in trainer.optimizers]
        content = {
            "model": {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)},
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
            "amp": apex_scales(trainer.precision.state_dict()),
        }
        problem = ""
        if trainer.is_global_zero:
            try:
                write_checkpoint(path, content)
            except CheckpointError as error:
                problem = str(error)
        if problem := trainer.strategy.broadcast(problem):
            raise CheckpointError(problem)

    def load(self, path: str | Path) -> None:
        """Takes weights, optimizer state and loss scale from apex's file; every rank calls it."""
        trainer = self._running("load")
        checkpoint = read_checkpoint(path)
        if checkpoint.get("source") != "apex":
            raise CheckpointError(
                f"{path} is not apex's file with 'model', 'optimizer' and 'amp'; give it to fit(ckpt_path=...)"
            )
        states = checkpoint["optimizer_states"]
        if len(states) != len(trainer.optimizers):
            raise CheckpointError(
                f"{path} holds {len(states)} optimizers, configure_optimizers returned {len(trainer.optimizers)}"
            )
        with fitting(str(path), "content"):
            names = set(trainer.module.state_dict())
            trainer.module.load_state_dict(fit_names(checkpoint["state_dict"], names))
            for optimizer, state in zip(trainer.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            trainer.precision.load_state_dict(checkpoint["amp"])

    def _running(self, name: str) -> Trainer:
        if self._trainer is None:
            raise ConfigError(f"AmpState.{name} needs a run: call it in a hook from on_fit_start on, or after fit")
        return self._trainer

    def _log(self, trainer: Trainer, step: int) -> None:
        if not trainer.is_global_zero:
            return
        skipped = trainer.precision.skipped_steps
        values = {
            "amp/loss_scale": trainer.precision.scale,
            "amp/applied_steps": float(step - skipped),
            "amp/skipped_steps": float(skipped),
        }
        for one in trainer.loggers:
            one.log_metrics(values, step)


def _prefix_of(module: nn.Module, model: nn.Module | None) -> str:
    if model is None or model is module:
        return ""
    for name, child in module.named_modules():
        if child is model:
            return f"{name}."
    raise ConfigError(f"AmpState.save got a {type(model).__name__} that is no submodule of {type(module).__name__}")
