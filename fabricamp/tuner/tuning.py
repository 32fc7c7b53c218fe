"""The Tuner: Lightning's names for the searches before a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp import launch
from fabricamp._utils.keywords import names_keywords
from fabricamp.arguments.checks import check_choice
from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
from fabricamp.callbacks.lr_finder import LearningRateFinder
from fabricamp.errors import ConfigError
from fabricamp.lightning.given import adopted, hand_back, searches_alone
from fabricamp.state import TrainerFn
from fabricamp.tuner.finders import find_batch_size, find_learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.data import DataModule
    from fabricamp.engine.runner import Runner
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer
    from fabricamp.tuner.lr_finder import LRFinder


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
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
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
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
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
        """Runs the search of Lightning's own Tuner, if that has called the Trainer for a search only; returns whether it had."""
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
        if self._trainer.strategy.checkpoint_form == "folder":
            name = self._trainer.strategy.name
            raise ConfigError(f"Tuner with strategy={name!r} is not offered: search on a smaller model, with 'single'")
        if isinstance(options, BatchSizeFinder):
            find_batch_size(self._trainer, options, module, source)
        else:
            find_learning_rate(self._trainer, options, module, source, self._somewhere)

    def _check(
        self, method: str, model: TrainingModule, train: Any, val: Any, others: Any, datamodule: DataModule | None
    ) -> tuple[TrainingModule, GivenData]:
        check_choice("method", method, tuple(one.value for one in TrainerFn))
        if method == "fit" and others is not None:
            raise ConfigError("method='fit' takes train_dataloaders and val_dataloaders, not dataloaders")
        if method != "fit" and (train is not None or val is not None):
            raise ConfigError(f"method={method!r} takes dataloaders, not train_dataloaders and val_dataloaders")
        return self._trainer._runner.check_call(
            TrainerFn(method), model, train, val if method == "fit" else others, datamodule
        )

    def _somewhere(self, search: Callable[[Trainer], Any]) -> Any:
        """Runs the search here, or in processes that the Trainer starts; with "script" each one runs the script again."""
        runner = self._trainer._runner
        if not runner.launches:
            return search(self._trainer)
        start = launch.choose_start_method(runner.settings.start_method)
        if start == "script":
            launch.run_script(runner.num_processes)
        return launch.run_function(_in_worker, (runner, search), runner.num_processes, start)


def _in_worker(runner: Runner, search: Callable[[Trainer], Any]) -> Any:
    runner.become_worker()
    return search(runner.trainer)
