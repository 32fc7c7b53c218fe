"""Logs the learning rates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError
from fabricamp.metrics.values import as_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_ANY = "any"
"""The interval of an optimizer without a scheduler: logged by epoch and by step, because hooks may change its rate."""


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group, as used by the logged step.

    Names: ``lr-Adam``, ``lr-Adam-1`` for a second optimizer of that class, ``lr-Adam/pg1`` or ``lr-Adam/<its name>`` for one of
    several groups, or the scheduler's ``name``.  The values are in ``trainer.callback_metrics`` too, and can be monitored.

    Args:
        logging_interval: "step" (every ``log_every_n_steps`` steps), "epoch", or None: that of each scheduler (without one: both).
        log_momentum: logs ``...-momentum`` too.
        log_weight_decay: logs ``...-weight_decay`` too.
        log_key_prefix: a text before each name.

    Raises:
        ConfigError: for another interval, or if there is no logger.

    Example:
        >>> monitor = LearningRateMonitor(logging_interval="step", log_key_prefix="optimizer/")
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        super().__init__()
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): choose 'step', 'epoch' or None"
            )
        check_kind(self, "True or False", log_momentum=log_momentum, log_weight_decay=log_weight_decay)
        check_kind(self, "a string", optional=True, log_key_prefix=log_key_prefix)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.last_values: dict[str, float] = {}
        self.lrs: dict[str, list[float]] = {}
        """The learning rates that were logged in this fit, by name."""
        self.last_momentum_values: dict[str, float | None] = {}
        """The momenta that were logged last, by name; None before the first."""
        self.last_weight_decay_values: dict[str, float | None] = {}
        """The weight decays that were logged last, by name; None before the first."""
        self._next_step: float = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks the names of parameter groups; raises :class:`ConfigError` if there is no logger."""
        if trainer.is_global_zero and not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigError("LearningRateMonitor needs a logger: Trainer(logger=True), or leave the callback out")
        names = [
            self._name_of(name, group, optimizer)
            for name, _, optimizer in self._name_optimizers(trainer)
            for group in range(len(optimizer.param_groups))
        ]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        # A run that resumes within an accumulation has logged the current step already.
        self._next_step = self._due_after(trainer, trainer.global_step + (trainer.state.open_batches > 0))

    def holds_at(self, global_step: int) -> float:
        """Returns inf: the host knows the learning rates, so no launch has to end for them."""
        return math.inf

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Logs before each step at which metrics are flushed, under the same step number."""
        step = trainer.global_step + 1
        if step < self._next_step:
            return
        self._next_step = self._due_after(trainer, step)
        self._log(trainer, "step", trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Logs rates that change by epoch, except in a resumed epoch, where they were logged already."""
        if trainer.state.batch_idx == 0:
            self._log(trainer, "epoch", trainer.global_step)

    def _due_after(self, trainer: Trainer, step: int) -> float:
        every = trainer.log_every_n_steps or math.inf
        return (step // every + 1) * every

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        if self.logging_interval not in (None, interval):
            return
        values: dict[str, float] = {}
        for name, own_interval, optimizer in self._name_optimizers(trainer):  # read anew: SWA may replace the scheduler
            if self.logging_interval is not None or own_interval in (interval, _ANY):
                values.update(self._values(name, optimizer))
        if values:
            self.last_values.update(values)
            self._store(values)
            trainer.callback_metrics.update(as_tensors(values))
            if trainer.is_global_zero:
                trainer.delivery.log_metrics(values, step)

    def _store(self, values: dict[str, float]) -> None:
        """Stores the values in Lightning's attributes."""
        for name, value in values.items():
            if name.endswith("-momentum"):
                self.last_momentum_values[name] = value
            elif name.endswith("-weight_decay"):
                self.last_weight_decay_values[name] = value
            else:
                alone = name.removesuffix("/pg1")  # its name while the optimizer had one group
                if alone != name and alone in self.lrs:
                    self.lrs[name] = self.lrs.pop(alone)
                self.lrs.setdefault(name, []).append(value)

    def _values(self, name: str, optimizer: Optimizer) -> Iterator[tuple[str, float]]:
        for number, group in enumerate(optimizer.param_groups):
            key = self._name_of(name, number, optimizer)
            yield key, float(group["lr"])
            if self.log_momentum and ("betas" in group or "momentum" in group):
                yield f"{key}-momentum", float(group["betas"][0] if "betas" in group else group["momentum"])
            if self.log_weight_decay and "weight_decay" in group:
                yield f"{key}-weight_decay", float(group["weight_decay"])

    def _name_of(self, name: str, number: int, optimizer: Optimizer) -> str:
        """Returns the name of group ``number`` (from 0) of the optimizer called ``name``; of a single one without name, that."""
        groups = optimizer.param_groups
        alone = len(groups) == 1
        own = groups[number].get("name") or (None if alone else f"pg{number + 1}")
        return name if own is None else f"{name}/{own}"

    def _name_optimizers(self, trainer: Trainer) -> Iterator[tuple[str, str, Optimizer]]:
        """Yields (name, interval, optimizer) of each scheduler, then of the optimizers without one."""
        scheduled = [
            (config.scheduler.optimizer, config.name, config.interval)
            for config in trainer.lr_scheduler_configs
            if hasattr(config.scheduler, "optimizer")  # objects that the module steps itself may have no such attribute
        ]
        others = [
            (optimizer, None, _ANY)
            for optimizer in trainer.optimizers
            if not any(optimizer is other for other, _, _ in scheduled)
        ]
        used: set[str] = set()
        for optimizer, own_name, interval in [*scheduled, *others]:
            self._check_group_names(optimizer)
            base = self.log_key_prefix + (own_name or f"lr-{type(optimizer).__name__}")
            name = base
            number = 0
            while name in used:
                number += 1
                name = f"{base}-{number}"
            used.add(name)
            yield name, interval, optimizer

    def _check_group_names(self, optimizer: Optimizer) -> None:
        names = [group["name"] for group in optimizer.param_groups if "name" in group]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"LearningRateMonitor: parameter groups of {type(optimizer).__name__} share the name {', '.join(twice)}; "
                "give each group its own 'name', or none"
            )
