"""Searches for a learning rate: the result, and the search, a short training with a rate that grows at each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp._utils.optional_packages import load
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, NonFiniteError
from fabricamp.habits import habits
from fabricamp.tuner.trials import leaving_no_trace, train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, AnyOutput, ParamGroup
    from fabricamp.callbacks.lr_finder import LearningRateFinder
    from fabricamp.engine.run_parts import RunParts
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_SMOOTHING = 0.98


class LRFinder:
    """The result of ``Tuner.lr_find``: the rates that were tried, the loss at each, and the suggested rate.

    ``print(finder)`` draws the curve in the terminal.

    Args:
        mode: "exponential" or "linear": how the rate grew.
        lr_min: the first rate.
        lr_max: the last rate, unless the search ended earlier.
        num_training: the number of rates to try.

    Example:
        >>> finder = LRFinder("linear", 0.1, 0.5, num_training=5)
        >>> finder.results = {"lr": [0.1, 0.2, 0.3, 0.4, 0.5], "loss": [3.0, 2.9, 1.0, 0.9, 2.0]}
        >>> finder.suggestion(skip_begin=1)
        0.2
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """``"lr"``: the rates that were tried, and ``"loss"``: the loss at each, smoothed over earlier losses.

        The numbers equal Lightning's.  The first ones are too small: a half, two thirds, three quarters of the loss.
        """

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Returns the rate at which the loss falls fastest; None if fewer than two losses are finite.

        Args:
            skip_begin: number of rates at the beginning that are not used.
            skip_end: number of rates at the end that are not used.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.results["lr"][index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draws loss over rate with matplotlib (``pip install matplotlib``); returns the figure, which has ``savefig``.

        Args:
            suggest: marks the suggested rate.
            show: opens a window, if there is a screen.
            ax: the axes to draw into; None makes a new figure.

        Raises:
            ConfigError: without matplotlib.
        """
        plt = load(
            "matplotlib.pyplot",
            "plot() draws with matplotlib, which is not installed; pip install matplotlib, or print(finder), which draws the curve "
            "as text",
        )
        rates = self.results["lr"]
        losses = self.results["loss"]
        if ax is None:
            _, ax = plt.subplots()
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        index = self._steepest() if suggest else None
        if index is not None:
            ax.plot(rates[index], losses[index], marker="o", markersize=10, color="red")
        if show:
            plt.show()
        return ax.figure

    def __str__(self) -> str:
        """Returns the curve as text, with the suggested rate marked."""
        rates = self.results["lr"]
        if not rates:
            return "no learning rate was tried"
        index = self._steepest()
        lines = _drawn(self.results["loss"], marked=index)
        scale = "logarithmic" if self.mode == "exponential" else "linear"
        suggestion = "no suggestion: too few losses" if index is None else f"suggestion O: {rates[index]:.4g}"
        last_line = f"{'loss':>{_LABEL}}  learning rate {rates[0]:.4g} to {rates[-1]:.4g}, {scale}; {suggestion}"
        return "\n".join([*lines, last_line])

    def _steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        """Returns the index of the rate at which the loss falls fastest; None if fewer than two losses are finite."""
        rates = self.results["lr"]
        losses = self.results["loss"]
        finite = [index for index in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[index])]
        if len(finite) < 2:
            return None
        values = torch.tensor([losses[index] for index in finite], dtype=torch.float32, device="cpu")
        spacing = torch.tensor([rates[index] for index in finite], dtype=torch.float32, device="cpu")
        slopes = torch.gradient(values, spacing=[spacing])[0]
        return finite[int(slopes.argmin())]


_LABEL = 10
_WIDTH = 60
_HEIGHT = 12


def _drawn(values: Sequence[float], *, marked: int | None) -> list[str]:
    """Returns the text lines of a plot of ``values``: ``*`` is a column's mean, ``O`` the column of index ``marked``."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ["(no finite value)"]
    low = min(finite)
    high = max(finite)
    width = min(_WIDTH, len(values))
    rows = [[" "] * width for _ in range(_HEIGHT)]
    for column in range(width):
        first = column * len(values) // width
        last = (column + 1) * len(values) // width
        within = [value for value in values[first:last] if math.isfinite(value)]
        if within:
            mean = sum(within) / len(within)
            share = (mean - low) / ((high - low) or 1.0)
            is_marked = marked is not None and first <= marked < last
            rows[round((1 - share) * (_HEIGHT - 1))][column] = "O" if is_marked else "*"
    labels = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    return [f"{labels.get(index, ''):>{_LABEL}} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]


# -- the search --------------------------------------------------------------------------------------------------------------------


def lr_find(trainer: Trainer, options: LearningRateFinder, module: TrainingModule, source: GivenData) -> LRFinder:
    """Runs the search on this process and the other ranks, restores the module, and returns the result."""
    rates = _rates(options)
    if not module.automatic_optimization and habits().manual_steps_keep_the_first_rate:
        rates = rates[:1] * len(rates)
    sweep = _Sweep(rates, options.early_stop_threshold)

    def prepare(parts: RunParts) -> None:
        _check_optimizers(parts.module, parts.optimizers)
        parts.schedulers.clear()
        sweep.groups = parts.optimizers[0].param_groups

    with leaving_no_trace(trainer, module, sweep):
        train(trainer, module, source, options.num_training_steps, prepare=prepare, within=_until_not_finite)
    finder = LRFinder(options.mode, options.min_lr, options.max_lr, options.num_training_steps)
    finder.results = {"lr": sweep.rates[: len(sweep.losses)], "loss": sweep.losses}
    return finder


def _rates(options: LearningRateFinder) -> list[float]:
    first = options.min_lr
    last = options.max_lr
    count = options.num_training_steps
    shares = [0.0, *((step + 1) / count for step in range(1, count))]
    if options.mode == "linear":
        return [first + share * (last - first) for share in shares]
    return [first * (last / first) ** share for share in shares]


def _check_optimizers(module: TrainingModule, optimizers: Sequence[Optimizer]) -> None:
    name = type(module).__name__
    count = len(optimizers)
    if count != 1:
        raise ConfigError(
            f"lr_find takes one optimizer, but configure_optimizers of {name} returned {count}; return one, with a parameter "
            "group for each part of the module"
        )


def _until_not_finite(run: Callable[[], Any]) -> bool:
    """Returns False if ``run`` raises NonFiniteError: with ``nan_policy="raise"`` it ends the search as a growing loss does."""
    try:
        run()
    except NonFiniteError:
        return False
    return True


class _Sweep(Callback):
    """Sets the next rate before each update, and records the update's loss: the mean over its micro-batches and all ranks."""

    def __init__(self, rates: list[float], early_stop_threshold: float | None) -> None:
        self.rates = rates
        self.losses: list[float] = []
        self.groups: list[ParamGroup] = []
        self._threshold = early_stop_threshold
        self._losses_of_step: list[Tensor] = []
        self._average = 0.0
        self._best = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int
    ) -> None:
        rate = self.rates[trainer.global_step]
        for group in self.groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._losses_of_step.append(loss.detach().float())
        if trainer.global_step == len(self.losses):  # the accumulation is not finished
            return
        if not self._losses_of_step:  # training_step returned None: this rate has no loss and cannot be suggested
            self.losses.append(math.nan)
            return
        mean = torch.stack(self._losses_of_step).mean()
        self._losses_of_step = []
        loss = trainer.strategy.reduce(mean).item()
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        step = len(self.losses) + 1
        smoothed = self._average / (1 - _SMOOTHING ** (step + 1))
        self.losses.append(smoothed)
        # `not <=` instead of `>`: nan ends the search too.
        if self._threshold is not None and step > 1 and not smoothed <= self._threshold * self._best:
            trainer.stop("the loss grows")
        if step == 1 or smoothed < self._best:
            self._best = smoothed
