"""Searches before a fit, and the use of their results.

:class:`Tuner` has Lightning's names for them; :func:`search_first` runs those of the Trainer's callbacks.  Both end in
:func:`find_learning_rate` and :func:`find_batch_size`, which set the values that were found.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from fabricamp import launch
from fabricamp._utils.keywords import names_keywords
from fabricamp._utils.say_once import say_once
from fabricamp.arguments.checks import check_choice
from fabricamp.callbacks.base import Callback
from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
from fabricamp.callbacks.lr_finder import LearningRateFinder
from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.checkpoint.hyperparameters import setting_refs
from fabricamp.errors import ConfigError, MissingAttributeError
from fabricamp.habits import say_difference
from fabricamp.hooks import overrides
from fabricamp.lightning.given import adopted, hand_back, searches_alone
from fabricamp.module import TrainingModule
from fabricamp.state import TrainerFn
from fabricamp.tuner.batch_size_scaling import scale_batch_size
from fabricamp.tuner.lr_finder import lr_find

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.data import DataModule
    from fabricamp.engine.runner import Runner
    from fabricamp.engine.source import GivenData
    from fabricamp.trainer import Trainer
    from fabricamp.tuner.lr_finder import LRFinder

_LOG = logging.getLogger("fabricamp")


class Tuner:
    """Looks for a learning rate, and for the largest batch size that fits into memory, before a fit.

    The searches are short runs with the Trainer's strategy and precision.  Afterwards module, random numbers, callbacks, loggers
    and counters are restored, also after an error; no file is written.

    Args:
        trainer: the Trainer that will run the fit.

    Example:
        >>> trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> tuner = Tuner(trainer)  # then tuner.lr_find(module) and trainer.fit(module)
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @names_keywords
    def lr_find(
        self,
        model: TrainingModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Trains a few steps with a growing rate; returns the result, None under ``fast_dev_run``.

        Args:
            model: the module, with one optimizer, under automatic optimization.
            train_dataloaders: a loader, or a DataModule; None if the module or ``datamodule`` has it.
            val_dataloaders: not used.
            dataloaders: refused, as in Lightning.
            datamodule: a DataModule in place of loaders.
            method: only "fit".
            min_lr: the first rate.
            max_lr: the last rate.
            num_training: number of rates to try, with one update each.
            mode: how the rate grows: "exponential" or "linear".
            early_stop_threshold: ends the search when the loss exceeds this multiple of the smallest loss; None: never.
            update_attr: sets the module's attribute to the suggested rate.
            attr_name: the name of that attribute or hyper-parameter; "" means ``lr`` or ``learning_rate``.

        Raises:
            ConfigError: for a wrong argument, several optimizers, manual optimization, or if there is no attribute to set.
        """
        if method != "fit":
            raise ConfigError(f"lr_find(method={method!r}) cannot work: only 'fit' has a learning rate")
        options = LearningRateFinder(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr=update_attr, attr_name=attr_name
        )
        self._search(options, *self._check(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule))
        found: LRFinder | None = options.optimal_lr
        return found

    @names_keywords
    def scale_batch_size(
        self,
        model: TrainingModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Searches for the largest batch size that fits into memory, sets and returns it; returns None under ``fast_dev_run``.

        Args:
            model: the module, which makes its loaders with ``batch_arg_name`` if the DataModule does not.
            train_dataloaders: only a DataModule: a loader's batch size cannot be changed.
            val_dataloaders: refused: a loader's batch size cannot be changed.
            dataloaders: refused: a loader's batch size cannot be changed.
            datamodule: a DataModule that makes its loaders with ``batch_arg_name``.
            method: the run to try: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until it does not fit; "binsearch" then searches between the last two sizes.
            steps_per_trial: number of steps, or batches, to run with each size.
            init_val: the first size.
            max_trials: the search ends after this number of sizes that fit.
            batch_arg_name: the attribute or hyper-parameter of module or DataModule that has the batch size.
            margin: the share of the found size by which "binsearch" reduces the result.
            max_val: the largest size that is tried.

        Raises:
            ConfigError: for a wrong argument, several processes, loaders, or if nothing has ``batch_arg_name``.
        """
        options = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._search(options, *self._check(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule))
        return None if self._trainer.fast_dev_run else options.optimal_batch_size

    def searches_for_lightnings(self, module: TrainingModule, source: GivenData) -> bool:
        """Runs a search if Lightning's own Tuner has called the Trainer for one; returns whether it did."""
        callbacks = self._trainer.callbacks
        finder = next((one for one in callbacks if searches_alone(one)), None)
        if finder is None:
            return False
        callbacks.remove(finder)
        ours = adopted(finder)
        self._search(ours, module, source)
        hand_back([ours])
        return True

    def _search(self, options: LearningRateFinder | BatchSizeFinder, module: TrainingModule, source: GivenData) -> None:
        if self._trainer.strategy.sharding.shards:
            name = self._trainer.strategy.name
            raise ConfigError(f"Tuner with strategy={name!r} is not offered: search on a smaller model, with 'single'")
        if isinstance(options, BatchSizeFinder):
            find_batch_size(self._trainer, options, module, source)
        else:
            find_learning_rate(self._trainer, options, module, source, self._run_in_processes)
        if isinstance(module, TrainingModule):  # stays attached, as after a fit; Lightning's own modules are detached
            module.trainer = self._trainer

    def _check(
        self,
        method: str,
        model: TrainingModule,
        train: object,
        val: object,
        others: object,
        datamodule: DataModule | None,
    ) -> tuple[TrainingModule, GivenData]:
        check_choice("method", method, tuple(one.value for one in TrainerFn))
        if method == "fit" and others is not None:
            raise ConfigError("method='fit' takes train_dataloaders and val_dataloaders, not dataloaders")
        if method != "fit" and (train is not None or val is not None):
            raise ConfigError(f"method={method!r} takes dataloaders, not train_dataloaders and val_dataloaders")
        second = val if method == "fit" else others
        return self._trainer._runner.check_call(TrainerFn(method), model, train, second, datamodule)

    def _run_in_processes(self, search: Callable[[Trainer], Any]) -> Any:
        """Runs the search here, or in processes that the Trainer starts; with "script" each one runs the script again."""
        runner = self._trainer._runner
        if runner.around is not None and not launch.is_on_first():
            return runner.for_all(functools.partial(self._run_in_processes, search))
        if not runner.launches:
            return search(self._trainer)
        start = launch.choose_start_method(runner.settings.start_method)
        if start == "script":
            launch.run_script(runner.num_processes)
        return launch.run_function(_in_worker, (runner, search), runner.num_processes, start)


def _in_worker(runner: Runner, search: Callable[[Trainer], Any]) -> Any:
    runner.become_worker()
    return search(runner.trainer)


# -- the searches ------------------------------------------------------------------------------------------------------------------


def search_first(trainer: Trainer, module: TrainingModule, source: GivenData, ckpt_path: object) -> None:
    """Runs the searches of the Trainer's callbacks in order; none in a resumed run, whose checkpoint has the values."""
    if ckpt_path not in (None, "auto"):
        return
    for callback in [*trainer.callbacks]:
        if not isinstance(callback, LearningRateFinder | BatchSizeFinder) or overrides(
            callback, "on_fit_start", Callback
        ):
            continue
        say_difference(
            f"{type(callback).__name__} searches before the fit, which then has the random numbers of a fit without a search; "
            "Lightning searches in on_fit_start"
        )
        if isinstance(callback, BatchSizeFinder):
            find_batch_size(trainer, callback, module, source)
        elif source.fn is TrainerFn.FITTING:
            find_learning_rate(trainer, callback, module, source, lambda search: search(trainer))


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
    names = (options.attr_name,) if options.attr_name else ("lr", "learning_rate")
    name = next((name for name in names if setting_refs(name, module, source.datamodule)), None)
    if options.update_attr and name is None:
        raise MissingAttributeError(
            f"{type(module).__name__} and its hparams have no {' or '.join(map(repr, names))} that lr_find could set; keep the "
            "rate there and make the optimizer with it, or give attr_name= its name, or update_attr=False"
        )
    say_difference(
        "lr_find repeats the data until all rates are tried, and takes the mean loss of micro-batches and ranks; Lightning ends "
        "with the data, and takes rank 0's loss"
    )
    finder = run(functools.partial(lr_find, options=options, module=module, source=source))
    options.optimal_lr = finder
    rate = finder.suggestion()
    tried = finder.results["lr"]
    if rate is None:
        _report(trainer, f"lr_find: {len(tried)} learning rates are too few for a suggestion; raise num_training")
        return
    if options.update_attr and name is not None:
        options.found = {"name": name, "rate": rate}
        for holder in setting_refs(name, module, source.datamodule):
            holder.value = rate
    _report(
        trainer, f"lr_find: {len(tried)} learning rates from {tried[0]:.3g} to {tried[-1]:.3g}, suggestion {rate:.3g}"
    )


def find_batch_size(trainer: Trainer, options: BatchSizeFinder, module: TrainingModule, source: GivenData) -> None:
    """Searches for the batch size by ``options``, stores the result in ``options``, and sets the attribute."""
    if _is_trial(trainer, "scale_batch_size"):
        return
    say_difference(
        "scale_batch_size ends with all samples in one batch, and restores the random numbers; Lightning tries larger sizes, and "
        "its trials draw random numbers"
    )
    size = scale_batch_size(trainer, options, module, source)
    options.optimal_batch_size = size
    for holder in setting_refs(options.batch_arg_name, module, source.datamodule):
        holder.value = size
    _report(trainer, f"scale_batch_size: {size} samples a batch")


def _is_trial(trainer: Trainer, what: str) -> bool:
    if trainer.fast_dev_run:
        say_once(f"{what} is left out under fast_dev_run")
    return trainer.fast_dev_run > 0


def _report(trainer: Trainer, line: str) -> None:
    """Logs the line on rank 0 if the Trainer has a progress bar or a model summary."""
    if trainer.is_global_zero and any(
        isinstance(callback, ProgressBar | ModelSummary) for callback in trainer.callbacks
    ):
        _LOG.info(line)
