"""Runs the searches that callbacks and the Tuner describe, and sets the values that they found."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from fabricamp._utils.say_once import say_once
from fabricamp.callbacks.base import Callback
from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
from fabricamp.callbacks.lr_finder import LearningRateFinder
from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.checkpoint.hyperparameters import setting_refs
from fabricamp.errors import ConfigError
from fabricamp.hooks import overrides
from fabricamp.state import TrainerFn
from fabricamp.tuner.batch_size_scaling import scale_batch_size
from fabricamp.tuner.lr_finder import lr_find

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

_RATES = ("lr", "learning_rate")


def search_first(trainer: Trainer, module: TrainingModule, source: GivenData, ckpt_path: object) -> None:
    """Runs the searches of the Trainer's callbacks in order; none in a resumed run, whose checkpoint has the values."""
    if ckpt_path not in (None, "auto"):
        return
    for one in [*trainer.callbacks]:
        if isinstance(one, LearningRateFinder | BatchSizeFinder) and not overrides(one, "on_fit_start", Callback):
            if isinstance(one, BatchSizeFinder):
                find_batch_size(trainer, one, module, source)
            elif source.fn is TrainerFn.FITTING:
                find_learning_rate(trainer, one, module, source, lambda search: search(trainer))


def find_learning_rate(
    trainer: Trainer,
    options: LearningRateFinder,
    module: TrainingModule,
    source: GivenData,
    run: Callable[[Callable[[Trainer], Any]], Any],
) -> None:
    """Searches for the learning rate by ``options`` through ``run``, stores the result in ``options``, and sets the attribute."""
    if _is_trial(trainer, "lr_find"):
        return
    names = (options.attr_name,) if options.attr_name else _RATES
    name = next((name for name in names if setting_refs(name, module, source.datamodule)), None)
    if options.update_attr and name is None:
        raise ConfigError(
            f"{type(module).__name__} and its hparams have no {' or '.join(map(repr, names))} that lr_find could set; keep the "
            "rate there and make the optimizer with it, or give attr_name= its name, or update_attr=False"
        )
    finder = run(functools.partial(lr_find, options=options, module=module, source=source))
    options.optimal_lr, rate = finder, finder.suggestion()
    tried = finder.results["lr"]
    if rate is None:
        _tell(trainer, f"lr_find: {len(tried)} learning rates are too few for a suggestion; raise num_training")
        return
    if options.update_attr and name is not None:
        options.found = {"name": name, "rate": rate}
        for holder in setting_refs(name, module, source.datamodule):
            holder.value = rate
    _tell(
        trainer, f"lr_find: {len(tried)} learning rates from {tried[0]:.3g} to {tried[-1]:.3g}, suggestion {rate:.3g}"
    )


def find_batch_size(trainer: Trainer, options: BatchSizeFinder, module: TrainingModule, source: GivenData) -> None:
    """Searches for the batch size by ``options``, stores the result in ``options``, and sets the attribute."""
    if _is_trial(trainer, "scale_batch_size"):
        return
    size = scale_batch_size(trainer, options, module, source)
    options.optimal_batch_size = size
    for holder in setting_refs(options.batch_arg_name, module, source.datamodule):
        holder.value = size
    _tell(trainer, f"scale_batch_size: {size} samples a batch")


def _is_trial(trainer: Trainer, what: str) -> bool:
    if trainer.fast_dev_run:
        say_once(f"{what} is left out under fast_dev_run")
    return trainer.fast_dev_run > 0


def _tell(trainer: Trainer, line: str) -> None:
    """Logs the line on rank 0 if the Trainer has a progress bar or a model summary."""
    if trainer.is_global_zero and any(isinstance(one, ProgressBar | ModelSummary) for one in trainer.callbacks):
        _LOG.info(line)
