"""Steps learning-rate schedulers: every N applied steps or epochs, or when a monitored value is known."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR

from fabricamp.errors import ConfigError
from fabricamp.habits import habits, say_difference
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.optimizers.later_groups import check_later_groups
from fabricamp.torch_private import inner_schedules, milestones_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.engine.optimizer_setup import SchedulerConfig
    from fabricamp.metrics import Metrics
    from fabricamp.state import RunState
    from fabricamp.trainer import Trainer


class Schedules:
    """The schedulers of a fit under automatic optimization; under manual optimization the user steps them."""

    def __init__(
        self, configs: Sequence[SchedulerConfig], module: TrainingModule, metrics: Metrics, state: RunState
    ) -> None:
        self.module = module
        self._metrics = metrics
        self._state = state
        self._configs = configs
        self._counts_batches = habits().schedules_count_batches
        self._passes_cycles = habits().one_cycle_passes_its_end
        self._own_step = module.lr_scheduler_step if overrides(module, "lr_scheduler_step", TrainingModule) else None
        self._ended: set[int] = set()  # ids of schedules whose last rate was the last step's
        self.sort()

    def sort(self) -> None:
        """Sorts the present schedulers by interval: hooks before an epoch may have replaced them, or added parameter groups."""
        configs = self._configs
        for config in configs:
            check_later_groups(config.scheduler)
        optimizers = [getattr(config.scheduler, "optimizer", None) for config in configs]
        self._optimizers = [one for one in optimizers if isinstance(one, Optimizer)]
        self._groups = self._count_groups()
        self.by_step = [config for config in configs if config.interval == "step"]
        """The schedulers that step by steps."""
        self._by_epoch = [config for config in configs if config.interval == "epoch" and not config.reduce_on_plateau]
        self._by_epoch_monitored = [
            config for config in configs if config.interval == "epoch" and config.reduce_on_plateau
        ]

    @property
    def follow_steps(self) -> bool:
        """Whether any scheduler steps by steps."""
        return bool(self.by_step)

    def advance(self, applied_steps: int) -> None:
        """Steps the schedulers that step by steps; ``applied_steps`` is the number of steps that were not skipped.

        In a program written for Lightning, ``frequency`` counts the batches of the epoch, as there.
        """
        done = self._state.batch_idx + 1 if self._counts_batches else applied_steps
        for config in self.by_step:
            if done % config.frequency == 0:
                self._step(config)

    def catch_up(self, applied_steps: int) -> None:
        """Steps as :meth:`advance` does, for a step of an earlier run; not the schedulers that monitor a value: it is not known."""
        for config in self.by_step:
            if applied_steps % config.frequency == 0 and not config.reduce_on_plateau:
                self._step(config)

    def end_epoch(self, epoch: int) -> None:
        """Steps the schedulers that step by epochs, at the epoch's last batch."""
        for config in self._by_epoch:
            if (epoch + 1) % config.frequency == 0:
                self._step(config)

    def end_epoch_monitored(self, epoch: int) -> None:
        """Steps the schedulers that monitor a value, once the epoch's values are reduced over ranks."""
        for config in self._by_epoch_monitored:
            if (epoch + 1) % config.frequency == 0:
                self._step(config)

    def _count_groups(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self._optimizers]

    def _step(self, config: SchedulerConfig) -> None:
        if self._count_groups() != self._groups:  # a hook within the epoch has added one
            self.sort()
        cycle = ended_cycle(config.scheduler)
        if cycle is not None and not self._passes_cycles:
            self._end(config, cycle)
            return
        metric = None
        if config.reduce_on_plateau:
            metric = self._monitored(config)
            if metric is None:
                return
        if self._own_step is not None:
            self._own_step(config.scheduler, metric)
        else:
            TrainingModule.lr_scheduler_step(self.module, config.scheduler, metric)

    def _end(self, config: SchedulerConfig, cycle: OneCycleLR) -> None:
        """Leaves the rate of the last step in the groups; raises :class:`ConfigError` if another step was made after it."""
        if id(config.scheduler) not in self._ended:
            self._ended.add(id(config.scheduler))
            return
        steps = cycle.total_steps
        length, limit = {"step": ("estimated_stepping_batches", "max_steps"), "epoch": ("max_epochs",) * 2}[
            config.interval
        ]
        raise ConfigError(
            f"a OneCycleLR of {steps} steps has ended, and the run goes on; build it with total_steps=self.trainer.{length}, or "
            f"train with {limit}={steps * config.frequency}"
        )

    def _monitored(self, config: SchedulerConfig) -> object:
        """Returns the monitored value; None if it was not logged since this scheduler's last step.

        Raises :class:`ConfigError` if it was never logged and the config is ``strict``.
        """
        if config.interval == "step":
            self._metrics.reduce_steps(self._state.global_step)  # needed now, so this waits for the step's values
        monitor = str(config.monitor)
        value = self._metrics.take_new(monitor, self._configs.index(config))
        if value is not None:
            return value
        known = self._metrics.monitored()
        if monitor in known:
            say_difference(
                "a plateau schedule waits if its value was not logged since its last step; Lightning counts the last one again"
            )
        elif config.strict:
            logged = ", ".join(sorted(known)) or "nothing yet"
            epochs = self.module.trainer.check_val_every_n_epoch
            cure = "'strict': False in its dict, with which it waits for the next value"
            if epochs is not None and epochs > 1 and config.interval == "epoch":
                cure = f"'frequency': {epochs} in its dict, as check_val_every_n_epoch={epochs}, or {cure}"
            raise ConfigError(
                f"an lr_scheduler watches monitor={config.monitor!r}, which was not logged (logged: {logged}); log it, or set "
                f"{cure}"
            )
        return None


def ended_cycle(schedule: object) -> OneCycleLR | None:
    """Returns the OneCycleLR, ``schedule`` or one within it, that has no rate for another step; None if all have one.

    torch's takes one step more, to a rate beyond its last: 0.0188 after 4e-7, or below zero.
    """
    if isinstance(schedule, OneCycleLR):
        return schedule if schedule.last_epoch >= schedule.total_steps - 1 else None
    parts = inner_schedules(schedule)
    if isinstance(schedule, SequentialLR):
        milestones = milestones_of(schedule)
        next_step = schedule.last_epoch + 1
        # At a milestone the next schedule begins.
        parts = [] if next_step in milestones else [parts[bisect_right(milestones, next_step)]]
    return next((cycle for part in parts if (cycle := ended_cycle(part)) is not None), None)


def schedule_lengths(configs: Sequence[SchedulerConfig]) -> list[int | None]:
    """Returns how many steps each schedule has; None for one without an end."""
    return [getattr(config.scheduler, "total_steps", None) for config in configs]


def check_schedule_lengths(trainer: Trainer, configured: list[int | None]) -> None:
    """Raises :class:`ConfigError` if a checkpoint has replaced the configured schedule by one that is too short for the run."""
    restored = schedule_lengths(trainer.lr_scheduler_configs)
    for config, before, length in zip(trainer.lr_scheduler_configs, configured, restored, strict=True):
        if length is None or length == before:
            continue
        planned = trainer.estimated_stepping_batches if config.interval == "step" else trainer.max_epochs
        if length < planned // config.frequency:
            name = type(config.scheduler).__name__
            module = type(trainer.module).__name__
            raise ConfigError(
                f"{trainer.ckpt_path} holds a {name} of {length} {config.interval}s, but the run is to make {planned:g}, and a "
                f"{name} cannot be lengthened; resume with the limits of the run that wrote it, or begin a new one with its "
                f"weights: {module}.load_from_checkpoint(...) and fit without ckpt_path"
            )
