"""Stochastic weight averaging: a learning rate that stays high, the mean of the weights, and its BatchNorm statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks._averages import Averages, Rule, in_state, mean, refuse_several
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError
from fabricamp.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class StochasticWeightAveraging(Callback):
    """Averages the weights of the last epochs, which train with a separate learning rate.

    From ``swa_epoch_start`` on, torch's ``SWALR`` replaces the module's schedule, and the weights at the beginning of each epoch
    are averaged (fp32 masters at O2 and O5).  When a fit reaches ``max_epochs``, or ends with ``max_epochs=-1``, the module gets
    the average.  A forward pass over the training data (each rank its share) then computes BatchNorm's statistics, without updates
    and logs.  Until then validation and a checkpoint's ``state_dict`` have the weights; the average is in the callback's state.

    Args:
        swa_lrs: the final learning rate; a list: one for each parameter group.
        swa_epoch_start: the first averaged epoch, from 1 (int), or the share of ``max_epochs`` before it (float).
        annealing_epochs: number of epochs in which the learning rate reaches ``swa_lrs``.
        annealing_strategy: the shape of that change: "cos" or "linear".
        avg_fn: returns the new average, given the average, the weight and the number of averaged weights; None: the mean.
        device: where the average is kept; None: where the weights are.

    Raises:
        ConfigError: for wrong arguments, manual optimization, several optimizers or schedules, and a share of no ``max_epochs``.

    Example:
        >>> averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.75)
    """

    averages_weights: ClassVar[bool] = True

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008 - Lightning's default, and it cannot be changed
    ) -> None:
        super().__init__()
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        for rate in rates:
            check_kind(self, "a number", swa_lrs=rate)
        check_kind(self, "a number", swa_epoch_start=swa_epoch_start)
        check_kind(self, "a whole number", annealing_epochs=annealing_epochs)
        is_share = isinstance(swa_epoch_start, float)
        begins = 0 <= swa_epoch_start <= 1 if is_share else swa_epoch_start >= 1
        checks: list[tuple[str, Any, bool, str]] = [
            ("swa_lrs", swa_lrs, bool(rates) and min(rates) > 0, "a number above 0, or a list of such"),
            ("swa_epoch_start", swa_epoch_start, begins, "a whole number from 1, or a share (float) from 0.0 to 1.0"),
            ("annealing_epochs", annealing_epochs, annealing_epochs >= 0, "a whole number from 0"),
            ("annealing_strategy", annealing_strategy, annealing_strategy in ("cos", "linear"), "'cos' or 'linear'"),
            ("avg_fn", avg_fn, avg_fn is None or callable(avg_fn), "a function or None"),
        ]
        for name, value, fits, allowed in checks:
            if not fits:
                raise ConfigError(f"{type(self).__name__}({name}={value!r}): give {allowed}")
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._rule = Rule(share=mean) if avg_fn is None else Rule(one=avg_fn)
        self._device = None if device is None else torch.device(device)
        self._max_epochs = 0
        self._forget()

    def __getstate__(self) -> StateDict:
        """Returns the attributes without those of the current run."""
        own = ("_averages", "_saved", "_scheduler", "_trainer")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._averages: Averages | None = None
        self._saved: StateDict | None = None
        self._scheduler: SWALR | None = None
        self._trainer: Trainer | None = None
        self._latest_epoch = -1

    @property
    def swa_start(self) -> int:
        """The first epoch, from 0, at whose beginning the weights are averaged."""
        first = self._swa_epoch_start  # counted from 1, or a share of all epochs
        if isinstance(first, float):
            first = int(self._max_epochs * first)
        return max(first - 1, 0)

    @property
    def swa_end(self) -> float:
        """The last epoch, from 0, at whose beginning the weights are averaged; infinite with ``max_epochs=-1``."""
        return math.inf if self._max_epochs < 0 else self._max_epochs - 1

    @property
    def n_averaged(self) -> Tensor | None:
        """The number of averaged epochs, an int64 on the CPU; None before the first."""
        averages = self._averages
        if averages is None or not averages.begun:
            return None
        return torch.tensor(int(averages.count), dtype=torch.int64, device="cpu")

    # -- in a run ----------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Resets the average for each fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_several(self, trainer.callbacks)
            self._forget()
            self._trainer = trainer
            self._max_epochs = trainer.max_epochs

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks optimizers and schedules, and creates the average, from a checkpoint's average if there is one."""
        self._check(trainer, pl_module)
        averages = Averages(self._rule, self._device)
        self._averages = averages
        saved = self._saved
        self._saved = None
        averages.follow(pl_module, trainer.optimizers, trainer.strategy, {}, saved and saved["average"])
        if saved is not None:
            averages.count = saved["count"]
            averages.begun = saved["count"] > 0

    def _check(self, trainer: Trainer, module: TrainingModule) -> None:
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        rates = self._swa_lrs
        schedules = len(trainer.lr_scheduler_configs)
        other_number_of_rates = isinstance(rates, list) and [len(rates)] != groups
        problems = {
            "manual optimization: nothing steps a schedule there": not module.automatic_optimization,
            f"{len(groups)} optimizers: give one": len(groups) != 1,
            f"{schedules} schedules: give one, or none": schedules > 1,
            f"swa_epoch_start={self._swa_epoch_start!r}, a share of max_epochs=-1: give a whole number, or limit max_epochs": (
                trainer.max_epochs < 0 and isinstance(self._swa_epoch_start, float)
            ),
            f"swa_lrs={rates!r} for {sum(groups)} groups of parameters: give one for each": other_number_of_rates,
        }
        for problem, exists in problems.items():
            if exists:
                raise ConfigError(f"{type(self).__name__} cannot work with {problem}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Adds the weights at the beginning of the epoch to the average."""
        epoch = trainer.current_epoch
        averages = self._averages
        is_averaged = self.swa_start <= epoch <= self.swa_end
        if averages is None or not is_averaged or epoch <= self._latest_epoch:
            return
        self._latest_epoch = epoch
        if self._scheduler is None:
            self._anneal(trainer)
        averages.follow(pl_module, trainer.optimizers, trainer.strategy, {})
        trainer.precision_plugin.take_edits()  # masters have not seen yet what other hooks have just written
        averages.update(None)

    def _anneal(self, trainer: Trainer) -> None:
        """Replaces the module's schedule by one that leads to ``swa_lrs``."""
        optimizer = trainer.optimizers[0]
        rates = self._swa_lrs
        if not isinstance(rates, list):
            rates = [rates] * len(optimizer.param_groups)
        strategy = self._annealing_strategy
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate
        # The same value as in Lightning; torch's class itself uses another counter.
        last_epoch = self._max_epochs if strategy == "cos" else -1
        self._scheduler = SWALR(optimizer, rates, self._annealing_epochs, strategy, last_epoch)  # type: ignore[arg-type]  # takes a list too
        trainer.replace_schedules(self._scheduler)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the average into the module and computes BatchNorm's statistics, if all epochs were trained."""
        averages = self._averages
        if averages is None or not averages.begun:
            return
        if self._max_epochs >= 0 and trainer.current_epoch <= self.swa_end:
            return
        averages.put_in(pl_module, trainer.optimizers, trainer.strategy)
        norms = [norm for norm in pl_module.modules() if isinstance(norm, AnyBatchNorm) and _updates_statistics(norm)]
        if norms:
            _update_statistics(norms, trainer)

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns the progress of averaging; :meth:`on_save_checkpoint` adds the average itself."""
        averages = self._averages
        scheduler = self._scheduler
        if averages is None or not averages.begun or scheduler is None:
            return {}
        return {
            "n_averaged": int(averages.count),
            "latest_update_epoch": self._latest_epoch,
            "scheduler_state": copy.deepcopy(scheduler.state_dict()),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the progress and the average, before the schedule's state is loaded."""
        self._latest_epoch = state_dict["latest_update_epoch"]
        if state_dict.get("average_model_state") is not None:
            self._saved = {"average": state_dict["average_model_state"], "count": int(state_dict["n_averaged"])}
        if state_dict["scheduler_state"] is not None and self._scheduler is None and self._trainer is not None:
            self._check(self._trainer, self._trainer.module)
            self._anneal(self._trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Adds the average to the callback's state."""
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if own and self._averages is not None:
            own["average_model_state"] = in_state(pl_module, checkpoint["state_dict"], self._averages.values)


def _updates_statistics(norm: AnyBatchNorm) -> bool:
    """Returns whether a BatchNorm updates running statistics; a frozen one keeps its own."""
    return norm.training and norm.track_running_stats and norm.running_mean is not None


@torch.no_grad()
def _update_statistics(norms: list[AnyBatchNorm], trainer: Trainer) -> None:
    """Sets running statistics to the mean over all batches of the training data and over the ranks."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    try:
        trainer.forward_train_batches()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    for norm in norms:
        for value in (norm.running_mean, norm.running_var):
            assert value is not None
            value.copy_(trainer.strategy.reduce(value))
