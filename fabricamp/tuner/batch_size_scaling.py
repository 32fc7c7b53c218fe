"""Searches for the largest batch size that fits into memory, by runs (fits or evaluations) of a few steps each."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.checkpoint.hyperparameters import setting_refs
from fabricamp.data import leaves_of
from fabricamp.data.lengths import known_length
from fabricamp.engine.out_of_memory import is_out_of_memory
from fabricamp.engine.session import KINDS, LOADERS
from fabricamp.errors import ConfigError
from fabricamp.state import TrainerFn
from fabricamp.tuner.trials import evaluate, leaving_no_trace, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


def scale_batch_size(trainer: Trainer, options: BatchSizeFinder, module: TrainingModule, source: GivenData) -> int:
    """Returns the largest batch size found; restores module, data, Trainer and batch size afterwards."""
    holders = setting_refs(options.batch_arg_name, module, source.datamodule)
    _check(trainer, module, source, options.batch_arg_name, found=bool(holders))
    before = [holder.value for holder in holders]
    run = train if source.fn is TrainerFn.FITTING else evaluate

    def fits(size: int) -> bool:
        for holder in holders:
            holder.value = size
        guard = _Guard()
        run(trainer, module, source, options.steps_per_trial, within=guard)
        if not guard.fits:  # the frames of the aborted trial may be in reference cycles
            gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return guard.fits

    try:
        with leaving_no_trace(trainer, module):
            trainer._runner.settings.on_out_of_memory = "raise"  # the search looks for the error
            search = _Search(fits, lambda: _num_samples(trainer), options)
            size = search.doubled(options.init_val)
            if options.mode == "binsearch":
                size = max(1, int(search.halved() * (1 - options.margin)))
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.value = value
    return size


class _Search:
    """Searches for the largest size that ``fits``: doubles until a size does not fit, or until one batch has all samples."""

    def __init__(self, fits: Callable[[int], bool], num_samples: Callable[[], float], options: BatchSizeFinder) -> None:
        self._fits = fits
        self._num_samples = num_samples
        self._left = options.max_trials
        self._most: float = options.max_val
        self._low = 0
        self._high: int | None = None

    def doubled(self, size: int) -> int:
        """Returns the largest doubled size that fitted; the first size is halved until it fits."""
        size = int(min(size, self._most))
        while self._try(size):
            self._most = min(self._most, self._num_samples())
            is_known_too_large = self._high is not None and 2 * size >= self._high
            if self._left == 0 or size >= self._most or is_known_too_large:
                return self._low
            size = int(min(2 * size, self._most))
        if self._low:
            return self._low
        if size == 1:
            raise ConfigError(
                "a batch of 1 sample is too large for the memory already; make the model smaller, or choose precision='O2' or "
                "'bf16-mixed'"
            )
        return self.doubled(size // 2)

    def halved(self) -> int:
        """Returns the largest fitting size, by bisection between the largest that fitted and the smallest that did not."""
        while self._high is not None and self._high - self._low > 1 and self._left:
            self._try((self._low + self._high) // 2)
        return self._low

    def _try(self, size: int) -> bool:
        if self._fits(size):
            self._low = size
            self._left -= 1
            return True
        self._high = size
        return False


class _Guard:
    """Catches out-of-memory errors; ``fits`` is False after one."""

    def __init__(self) -> None:
        self.fits = True

    def __call__(self, run: Callable[[], Any]) -> bool:
        """Calls ``run`` and returns whether it completed; raises any other error."""
        try:
            run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.fits = False
        return self.fits


def _num_samples(trainer: Trainer) -> float:
    """Returns the largest number of samples among the last trial's loaders; infinity if a loader has no known length."""
    session = trainer._runner.session
    assert session is not None
    if session.fn is TrainerFn.FITTING:
        loaders = leaves_of(session.data.train_loader)
    else:
        loaders = session.data.evaluation_loaders(LOADERS[KINDS[session.fn]])
    return max(known_length(getattr(one, "dataset", None)) for one in loaders)


def _check(trainer: Trainer, module: TrainingModule, source: GivenData, name: str, *, found: bool) -> None:
    if trainer.world_size > 1:
        raise ConfigError(
            f"scale_batch_size works with one process, but this Trainer has {trainer.world_size} (strategy "
            f"{trainer.strategy.name!r}): a rank that is out of memory would leave the others waiting; search with devices=1"
        )
    kind = {TrainerFn.FITTING: "train", TrainerFn.VALIDATING: "val"}.get(source.fn, source.fn.value)
    if source.given(kind) is not None:
        raise ConfigError(
            f"scale_batch_size was given loaders, whose batch size it cannot change; write {kind}_dataloader into "
            f"{type(module).__name__} or a DataModule, with batch_size=self.{name}"
        )
    if not found:
        raise ConfigError(
            f"neither {type(module).__name__} nor its hparams, nor a DataModule, has {name!r}; keep the batch size under this name "
            "and make the loaders with it, or give batch_arg_name="
        )
