"""What a Trainer lets others see: Lightning's names, read from the parts that hold the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.early_stopping import EarlyStopping
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.state import RunState, Stage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.arguments import Settings
    from fabricamp.callbacks.base import Callback
    from fabricamp.data import DataModule
    from fabricamp.loggers.base import Logger
    from fabricamp.module import TrainingModule
    from fabricamp.optimization import SchedulerConfig
    from fabricamp.precision.base import Precision
    from fabricamp.session import Session
    from fabricamp.strategies.base import Strategy

__all__ = ["TrainerProperties"]


class TrainerProperties:
    """Read-only views for callbacks, loggers and users."""

    settings: Settings
    state: RunState
    strategy: Strategy
    precision: Precision
    callbacks: list[Callback]
    loggers: list[Logger]
    session: Session | None
    ckpt_path: str | None
    log_dir: str | None
    """The folder of this run's logs, the same on every rank; the default folder without a logger that writes files."""
    num_processes: int
    skipped_in_workers: int
    _launches: bool

    # -- parts -------------------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainingModule:
        """The module of the running, or last, fit, validate, test or predict."""
        return self._opened.module

    @property
    def lightning_module(self) -> TrainingModule:
        """The module, by Lightning's name."""
        return self.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule, where one was given."""
        return self._opened.source.datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """What ``configure_optimizers`` returned."""
        return self._opened.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers and when they step."""
        return self._opened.schedulers

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every :class:`ModelCheckpoint`."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first :class:`ModelCheckpoint`."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first :class:`EarlyStopping`."""
        return next((callback for callback in self.callbacks if isinstance(callback, EarlyStopping)), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every :class:`EarlyStopping`."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def train_dataloader(self) -> Any:
        """The loader that is trained on."""
        return self._opened.data.train_loader

    @property
    def val_dataloaders(self) -> list[Any]:
        """The loaders that are validated on."""
        return self._opened.data.evaluation_loaders("val")

    @property
    def test_dataloaders(self) -> list[Any]:
        """The loaders that are tested on."""
        return self._opened.data.evaluation_loaders("test")

    @property
    def predict_dataloaders(self) -> list[Any]:
        """The loaders whose batches are predicted."""
        return self._opened.data.evaluation_loaders("predict")

    @property
    def _opened(self) -> Session:
        if self.session is None:
            raise ConfigError(
                "the Trainer has no module yet; this can be read in and after fit, validate, test and predict"
            )
        return self.session

    # -- where the run stands ----------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """The number of attempted update windows."""
        return self.state.global_step

    @property
    def skipped_steps(self) -> int:
        """The number of windows skipped for overflow; during training as of two steps ago, exact after it."""
        return self.skipped_in_workers if self._launches else self.precision.skipped_steps

    @property
    def training(self) -> bool:
        """Whether ``fit`` runs, and not its validation."""
        return self.state.stage is Stage.FIT and not self.state.validating_in_fit

    @property
    def validating(self) -> bool:
        """Whether validation runs."""
        return self.state.stage is Stage.VALIDATE or self.state.validating_in_fit

    @property
    def testing(self) -> bool:
        """Whether ``test`` runs."""
        return self.state.stage is Stage.TEST

    @property
    def evaluating(self) -> bool:
        """Whether validation or ``test`` runs."""
        return self.validating or self.testing

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` runs."""
        return self.state.stage is Stage.PREDICT

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation batches before training run."""
        return self.state.stage is Stage.SANITY

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C, or a signal of the scheduler, ended the run."""
        return self.state.interrupted

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The values that callbacks watch: epoch values are those of all ranks."""
        return {} if self.session is None else self.session.metrics.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The values that went to the loggers last."""
        return {} if self.session is None else self.session.metrics.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress bar shows."""
        return {} if self.session is None else self.session.metrics.progress_bar_metrics

    # -- limits ------------------------------------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> float:
        """The epoch at which training ends; infinity for no limit."""
        return self.settings.max_epochs

    @property
    def max_steps(self) -> float:
        """The step at which training ends; infinity for no limit."""
        return self.settings.max_steps

    @property
    def min_epochs(self) -> int:
        """The epochs that a stop request has to wait for."""
        return self.settings.min_epochs

    @property
    def min_steps(self) -> int:
        """The steps that a stop request has to wait for."""
        return self.settings.min_steps

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of micro-batches in a step."""
        return self.settings.accumulate_grad_batches

    @property
    def gradient_clip_val(self) -> float | None:
        """What gradients are limited to; None for no limit."""
        return self.settings.clip.value if self.settings.clip is not None else None

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """What is limited: the "norm" of all gradients, or each "value"; None for no limit."""
        return self.settings.clip.algorithm if self.settings.clip is not None else None

    @property
    def log_every_n_steps(self) -> int:
        """The number of steps between two flushes of logged values."""
        return self.settings.log_every_n_steps

    @property
    def val_check_interval(self) -> float:
        """After how many micro-batches (int) or which share of an epoch (float) validation runs."""
        return self.settings.val_check_interval

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """In which epochs validation runs; None: micro-batches are counted across epochs."""
        return self.settings.check_val_every_n_epoch

    @property
    def fast_dev_run(self) -> int:
        """The number of batches of a trial run, 0 for a real one."""
        return self.settings.fast_dev_run

    @property
    def overfit_batches(self) -> float:
        """How many batches (int), or which share of them (float), training and validation have; 0 for all."""
        return self.settings.overfit_batches

    @property
    def limit_train_batches(self) -> float:
        """How many batches an epoch has at most (int), or which share of the loader's (float)."""
        return self.settings.limit_batches["train"]

    @property
    def limit_val_batches(self) -> float:
        """The same of each validation loader."""
        return self.settings.limit_batches["val"]

    @property
    def limit_test_batches(self) -> float:
        """The same of each loader to test."""
        return self.settings.limit_batches["test"]

    @property
    def limit_predict_batches(self) -> float:
        """The same of each loader to predict."""
        return self.settings.limit_batches["predict"]

    @property
    def default_root_dir(self) -> str:
        """Where logs and checkpoints go that have no other place."""
        return self.settings.default_root_dir

    @property
    def num_training_batches(self) -> float:
        """The number of micro-batches in an epoch on this rank; infinity where the loader does not tell."""
        return self._opened.data.num_training_batches

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch being trained on is the epoch's last."""
        return self._opened.data.is_last_batch

    @property
    def num_val_batches(self) -> list[float]:
        """The number of validation batches, one a loader."""
        return self._opened.data.evaluation_lengths("val")

    @property
    def num_test_batches(self) -> list[float]:
        """The number of test batches, one a loader."""
        return self._opened.data.evaluation_lengths("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """The number of batches to predict, one a loader."""
        return self._opened.data.evaluation_lengths("predict")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """The number of validation batches that are run before training, one a loader."""
        return [min(self.settings.num_sanity_val_steps, length) for length in self.num_val_batches]

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of steps that training will take, for schedules; infinity where neither epochs nor steps are limited."""
        batches = self.num_training_batches
        if batches == float("inf") or self.max_epochs == float("inf"):
            return self.max_steps
        steps_per_epoch = -(-int(batches) // self.accumulate_grad_batches)
        return min(self.max_steps, steps_per_epoch * int(self.max_epochs))

    # -- processes ---------------------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self.strategy.environment.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return self.strategy.environment.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.strategy.environment.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes; known before the first run too."""
        return self.num_processes if self._launches else self.strategy.world_size

    @property
    def num_devices(self) -> int:
        """The number of processes, and devices, on this node."""
        return self.num_processes

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.settings.num_nodes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, the one that writes files and prints."""
        return self.global_rank == 0
