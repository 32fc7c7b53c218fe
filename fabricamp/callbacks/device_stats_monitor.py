"""Logs memory statistics of the device, and the load of the CPU."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import torch

from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, NotInstalledError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricamp._utils.types import AnyBatch, AnyOutput
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Logs statistics of rank 0's device at the start and the end of a batch, every ``log_every_n_steps`` batches.

    For a GPU these are ``torch.cuda.memory_stats``, without a wait; for the CPU ``cpu_percent``, ``cpu_vm_percent`` (memory) and
    ``cpu_swap_percent``, from the package psutil.  Names: ``DeviceStatsMonitor.on_train_batch_start/cpu_percent``.

    Args:
        cpu_stats: True also logs the CPU's statistics, False never, None only if training runs on the CPU.

    Raises:
        ConfigError: if there is no logger, or the CPU's statistics need psutil, which is not installed.

    Example:
        >>> monitor = DeviceStatsMonitor(cpu_stats=True)
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        super().__init__()
        self.cpu_stats = cpu_stats
        self._step: int | None = None  # of the current train batch if it is logged

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises :class:`ConfigError` if there is no logger, or if psutil is needed and not installed."""
        super().setup(trainer, pl_module, stage)
        if stage == "predict":
            return
        if stage == "fit" and trainer.is_global_zero and not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigError("DeviceStatsMonitor needs a logger: Trainer(logger=True), or leave the callback out")
        if trainer.loggers and wants_cpu(trainer.strategy.device, self.cpu_stats):
            if importlib.util.find_spec("psutil") is None:
                raise NotInstalledError(
                    f"DeviceStatsMonitor(cpu_stats={self.cpu_stats!r}) logs the CPU's numbers with the package psutil, which is "
                    "not installed: pip install psutil, or give cpu_stats=False"
                )
            read_cpu()  # psutil reports the load since the previous call

    def holds_at(self, global_step: int) -> float:
        """Returns inf: the memory is read as it is, so no launch has to end for it."""
        return math.inf

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Logs before each step whose metrics are logged, under the same step number."""
        step = trainer.global_step
        self._step = step if is_due(trainer, step + 1) else None
        if self._step is not None:
            self._log(trainer, "on_train_batch_start", step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Logs after the same batch."""
        if self._step is not None:
            self._log(trainer, "on_train_batch_end", self._step)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Logs before each ``log_every_n_steps``-th batch of a loader."""
        self._log_evaluation(trainer, "on_validation_batch_start", batch_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Logs after the same batch."""
        self._log_evaluation(trainer, "on_validation_batch_end", batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Logs before each ``log_every_n_steps``-th batch of a loader."""
        self._log_evaluation(trainer, "on_test_batch_start", batch_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Logs after the same batch."""
        self._log_evaluation(trainer, "on_test_batch_end", batch_idx)

    def _log_evaluation(self, trainer: Trainer, hook: str, batch_idx: int) -> None:
        if is_due(trainer, batch_idx + 1):
            self._log(trainer, hook, trainer.state.logger_step(trainer.global_step))

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.device
        stats = dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}
        if wants_cpu(device, self.cpu_stats):
            stats.update(read_cpu())
        if stats:
            trainer.delivery.log_metrics(named(stats, type(self).__qualname__, hook), step)


def is_due(trainer: Trainer, number: int) -> bool:
    """Returns whether the ``number``-th step, or batch of an evaluation, is logged."""
    every = trainer.log_every_n_steps
    return every > 0 and (number % every == 0 or trainer.state.should_stop)


def wants_cpu(device: torch.device, cpu_stats: bool | None) -> bool:
    """Returns whether the CPU's statistics are logged."""
    return device.type == "cpu" if cpu_stats is None else cpu_stats


def read_cpu() -> dict[str, float]:
    """Returns the use of CPU, memory and swap on the whole machine, in percent."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def named(stats: Mapping[str, float], owner: str, hook: str) -> dict[str, float]:
    """Returns ``stats`` under the names that loggers get.

    >>> named({"num_ooms": 0}, "DeviceStatsMonitor", "on_test_batch_end")
    {'DeviceStatsMonitor.on_test_batch_end/num_ooms': 0}
    """
    return {f"{owner}.{hook}/{name}": value for name, value in stats.items()}
