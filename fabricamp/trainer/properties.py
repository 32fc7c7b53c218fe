"""The Trainer's properties: Lightning's names, read from the objects that hold the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.callbacks.early_stopping import EarlyStopping
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.engine.logger_setup import first_with_folder
from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.habits import habits
from fabricamp.hooks import overrides
from fabricamp.launch.devices import Accelerator, accelerator_of
from fabricamp.loggers.run_folder import writes
from fabricamp.module import TrainingModule
from fabricamp.precision import precision_name
from fabricamp.state import RunningStage, RunState, TrainerFn, TrainerStatus
from fabricamp.trainer.limits import TrainerLimits
from fabricamp.trainer.loops import EvaluationLoop, FitLoop, PredictionLoop, private_attribute

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricamp.callbacks.base import Callback
    from fabricamp.checkpoint.record import Record
    from fabricamp.data import DataModule, Feed
    from fabricamp.engine.optimizer_setup import SchedulerConfig
    from fabricamp.engine.runner import Runner
    from fabricamp.engine.session import Session
    from fabricamp.loggers.base import Logger
    from fabricamp.loggers.logger_collection import LoggerCollection
    from fabricamp.precision.base import Precision
    from fabricamp.profilers.profiler import Profiler
    from fabricamp.strategies.base import Strategy


class TrainerProperties(TrainerLimits):
    """Read-only views for callbacks, loggers and users."""

    state: RunState
    strategy: Strategy
    precision_plugin: Precision
    callbacks: list[Callback]
    loggers: list[Logger]
    profiler: Profiler
    ckpt_path: str | None
    device_type: str
    """"cpu" or "cuda"."""
    _runner: Runner

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Returns what a library reads of Lightning's internals; Python calls this for a name that the class lacks."""
            return private_attribute("Trainer", self, name)

    def __repr__(self) -> str:
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return (
            f"<Trainer: {self.state.status}, current_epoch={self.current_epoch}, global_step={self.global_step}, "
            f"{processes} on {self.device_type}, strategy={self.strategy.name!r}, precision={self.precision!r}>"
        )

    # -- parts -------------------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainingModule:
        """The module of the running, or the last, fit, validate, test or predict."""
        connected: TrainingModule | None = self.strategy.lightning_module
        if self._runner.session is None and connected is not None:  # by strategy.connect
            return connected
        return self._opened.module

    @property
    def lightning_module(self) -> TrainingModule:
        """The module, under Lightning's name."""
        return self.module

    @property
    def model(self) -> TrainingModule:
        """The module, under the name of ``fit``'s argument."""
        return self.module

    @property
    def precision(self) -> str:
        """Lightning's name of the precision, such as "32-true" or "16-mixed"; "O2", "O3" and "O5" have no other name."""
        return precision_name(self.precision_plugin)

    @property
    def barebones(self) -> bool:
        """Whether the Trainer only trains: ``Trainer(barebones=True)``."""
        return self._runner.settings.barebones

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule, if one was given."""
        return self._opened.source.datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned, of this fit or the last one."""
        return self._opened.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers and when they step, of this fit or the last one."""
        return self._opened.schedulers

    @property
    def delivery(self) -> LoggerCollection:
        """Sends values to all loggers, as in ``trainer.delivery.log_metrics(values, step)``; has loggers on rank 0 only."""
        return self._opened.delivery

    @property
    def train_feed(self) -> Feed:
        """The feed that supplies the steps of the running fit with batches; available from ``on_train_start`` on."""
        feed = self._opened.data.train_feed
        assert feed is not None
        return feed

    @property
    def record(self) -> Record:
        """The state of the running, or the last, fit: named sections that are saved and restored."""
        return self._opened.record

    @property
    def log_dir(self) -> str | None:
        """The folder of this run's logs, the same on every rank; the default folder if no logger writes files.

        Before the first run, a read on rank 0 already chooses the folder that the run will use; other ranks get None until the run
        begins.
        """
        known: str | None = vars(self)["log_dir"]
        if known is not None or not writes():
            return known
        first = first_with_folder(self)
        return self.default_root_dir if first is None else first.log_dir

    @log_dir.setter
    def log_dir(self, folder: str | None) -> None:
        vars(self)["log_dir"] = folder

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """Every :class:`Checkpoint`, including those of class :class:`ModelCheckpoint`."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        """The first :class:`ModelCheckpoint`, or else the first :class:`Checkpoint`; None if there is neither."""
        found = self.checkpoint_callbacks
        first = next(iter(found), None)
        if habits().first_checkpoint_callback_counts:
            return first
        return next((one for one in found if isinstance(one, ModelCheckpoint)), first)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first :class:`EarlyStopping`."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every :class:`EarlyStopping`."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or the collection of loaders that was given; None before and in other runs than fit."""
        return self._as_given("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or the collection of loaders that was given; None if there are none."""
        return self._as_given("val")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, or the collection of loaders that was given; None if there are none."""
        return self._as_given("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, or the collection of loaders that was given; None if there are none."""
        return self._as_given("predict")

    def _as_given(self, name: str) -> Any:
        session = self._runner.session
        return None if session is None else session.data.as_given(name)

    @property
    def _opened(self) -> Session:
        if self._runner.session is None:
            raise ConfigError(
                "the Trainer has no module yet; this can be read in and after fit, validate, test and predict"
            )
        return self._runner.session

    # -- position of the run -----------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        self._refuse_in_a_capture("current_epoch")
        return self.state.epoch + (self.state.ended_within_epoch and habits().cut_epochs_count)

    @property
    def global_step(self) -> int:
        """The number of attempted steps."""
        self._refuse_in_a_capture("global_step")
        if self.state.user_call.ahead:
            raise ConfigError(
                "global_step was read by a transfer hook that runs ahead of its step, where the step is not known yet; read it in "
                "on_after_batch_transfer, or give Trainer(prefetch_batches=0)"
            )
        return self.state.global_step

    def _refuse_in_a_capture(self, name: str) -> None:
        if self.state.user_call.capturing:
            raise NotCapturableError(
                f"the step reads {name}, which stays constant in a step captured as a CUDA graph; count in a buffer on the "
                "device, or leave it out"
            )

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because of overflow; it lags by two steps during training, and is exact after it."""
        verdicts = self.precision_plugin.verdicts if self.state.global_step else None
        return self.state.skipped_before + (0 if verdicts is None else verdicts.skipped_steps)

    @property
    def training(self) -> bool:
        """Whether ``fit`` is running, outside its validation."""
        return self.state.stage is RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """Whether validation is running."""
        return self.state.stage is RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """Whether ``test`` is running."""
        return self.state.stage is RunningStage.TESTING

    @property
    def evaluating(self) -> bool:
        """Whether validation, the sanity check or ``test`` is running."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` is running."""
        return self.state.stage is RunningStage.PREDICTING

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check (the validation batches before training) is running."""
        return self.state.stage is RunningStage.SANITY_CHECKING

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C, a signal of the scheduler or an exception ended the run."""
        return self.state.interrupted or self.state.status is TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM ended the run."""
        return self.state.stop_request.interruption == "SIGTERM"

    @property
    def enable_validation(self) -> bool:
        """Whether ``fit`` validates: the module has a validation_step, and ``limit_val_batches`` is not 0."""
        return self.limit_val_batches > 0 and overrides(self.module, "validation_step", TrainingModule)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The logged values, as new tensors on the device: this rank's latest values within a step, otherwise those of all ranks.

        Reading them never waits, on any rank; ``float()`` of a tensor waits for the device.  Entries that callbacks add to the dict
        stay there, and can be monitored.
        """
        return {} if self._runner.session is None else self._runner.session.metrics.callback_metrics()

    @property
    def monitored_metrics(self) -> dict[str, Any]:
        """The values for monitors, on the host: those of all ranks, and entries that callbacks added to ``callback_metrics``."""
        return {} if self._runner.session is None else self._runner.session.metrics.monitored()

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The values sent to the loggers last, as new tensors; this rank's latest values within a step."""
        return {} if self._runner.session is None else self._runner.session.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress bar shows: this rank's latest within a step; on a GPU they lag by one or two refreshes."""
        return {} if self._runner.session is None else self._runner.session.metrics.progress_snapshot()

    # -- Lightning's loops --------------------------------------------------------------------------------------------------------

    @property
    def fit_loop(self) -> FitLoop:
        """The limits of a fit, which can be set, and its counters."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The numbers of validation batches and loaders."""
        own: EvaluationLoop | None = vars(self).get("validate_loop")
        return EvaluationLoop(self, "val") if own is None else own

    @validate_loop.setter
    def validate_loop(self, loop: EvaluationLoop) -> None:
        self._take_loop("validate_loop", loop)

    @property
    def test_loop(self) -> EvaluationLoop:
        """The numbers of test batches and loaders."""
        own: EvaluationLoop | None = vars(self).get("test_loop")
        return EvaluationLoop(self, "test") if own is None else own

    @test_loop.setter
    def test_loop(self, loop: EvaluationLoop) -> None:
        self._take_loop("test_loop", loop)

    def _take_loop(self, name: str, loop: object) -> None:
        """Takes a loop of a program that derives from Lightning's, to print results in its own way."""
        if not isinstance(loop, EvaluationLoop):
            raise ConfigError(
                f"trainer.{name} shows numbers and is not what runs, so {type(loop).__name__} cannot take its place; for a table "
                "of your own override Trainer.print_results(results, stage)"
            )
        vars(self)[name] = loop

    @property
    def predict_loop(self) -> PredictionLoop:
        """The predictions, and the numbers of batches and loaders to predict."""
        return PredictionLoop(self)

    # -- numbers of batches and steps --------------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> float:
        """The number of micro-batches in an epoch on this rank, in other runs that of the last fit; infinity if it is not known.

        The most that there can be, if the samples of a stream with workers decide.
        """
        session = self._runner.session
        if session is not None and session.fn is TrainerFn.FITTING:
            return session.data.num_training_batches
        length: float | None = self._runner.lengths(TrainerFn.FITTING).get("train")
        return float("inf") if length is None else length

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch being trained on is the epoch's last."""
        return self._opened.data.is_last_batch

    @property
    def validation_follows(self) -> bool:
        """Whether a validation follows the micro-batch being trained on; False for one that a time will make due."""
        return self._opened.validation_follows()

    @property
    def num_val_batches(self) -> list[float]:
        """The number of validation batches, one per loader: of ``validate`` if it runs or ran last, otherwise of the last fit."""
        session = self._runner.session
        fn = TrainerFn.VALIDATING if session is not None and session.fn is TrainerFn.VALIDATING else TrainerFn.FITTING
        return self._num_batches("val", fn)

    @property
    def num_test_batches(self) -> list[float]:
        """The number of test batches, one per loader."""
        return self._num_batches("test", TrainerFn.TESTING)

    @property
    def num_predict_batches(self) -> list[float]:
        """The number of batches to predict, one per loader."""
        return self._num_batches("predict", TrainerFn.PREDICTING)

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """The number of validation batches that are run before training, one per loader."""
        return [min(self.num_sanity_val_steps, length) for length in self._num_batches("val", TrainerFn.FITTING)]

    def _num_batches(self, name: str, fn: TrainerFn) -> list[float]:
        """Returns the numbers of batches of ``name`` in the running, or the last, run of ``fn``, one per loader."""
        session = self._runner.session
        if session is not None and session.fn is fn:
            return session.data.evaluation_lengths(name)
        found: list[float] = self._runner.lengths(fn).get(name, [])
        return found

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of steps that training will take, for schedules; infinity if neither epochs nor steps are limited."""
        batches, limits = self.num_training_batches, [self.max_steps] if self.max_steps >= 0 else []
        if batches != float("inf") and self.max_epochs >= 0:
            limits.append(self._steps_of(int(batches)))
        return min(limits, default=float("inf"))

    def _steps_of(self, batches: int) -> int:
        """Returns the number of steps in ``max_epochs`` epochs of ``batches`` micro-batches each."""
        settings = self._runner.settings
        if settings.partial_window == "carry":
            return batches * self.max_epochs // settings.accumulate_grad_batches
        windows = [
            settings.accumulated_in(epoch) for epoch in range(self.max_epochs if settings.accumulation_schedule else 1)
        ]
        steps = [(batches if settings.partial_window == "drop" else batches + one - 1) // one for one in windows]
        return sum(steps) if settings.accumulation_schedule else steps[0] * self.max_epochs

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
        return self._runner.num_processes if self._runner.launches else self.strategy.world_size

    @property
    def accelerator(self) -> Accelerator:
        """The kind of devices that the Trainer runs on, as an object with Lightning's methods."""
        return accelerator_of(self.device_type)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments for torch's ``DistributedSampler``; empty for one process."""
        rank, ranks = self.strategy.train_share
        return {"num_replicas": ranks, "rank": rank} if ranks > 1 else {}

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices, or of its processes on the CPU."""
        return list(self._runner.device_indices)

    @property
    def num_devices(self) -> int:
        """The number of processes, and devices, on this node."""
        return self._runner.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.global_rank == 0
