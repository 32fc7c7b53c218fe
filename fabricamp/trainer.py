"""The Trainer: checks its arguments, composes the parts, and runs fit, validate, test and predict."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from fabricamp import launch
from fabricamp.arguments import as_callbacks, as_loggers, check_flag, check_settings, refuse_unknown
from fabricamp.callbacks._resume import resolve_checkpoint
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.checkpoint import write_checkpoint
from fabricamp.data import DataModule
from fabricamp.errors import CheckpointError, ConfigError, NonFiniteError
from fabricamp.hooks import call_all, overrides
from fabricamp.loggers.run_folder import RunFolderLogger
from fabricamp.loggers.tensorboard import TensorBoardLogger
from fabricamp.module import TrainingModule
from fabricamp.ops.peer_memory import check_peers
from fabricamp.precision import precision_from
from fabricamp.properties import TrainerProperties
from fabricamp.rng import deterministic_mode
from fabricamp.session import KINDS, Session
from fabricamp.source import Source
from fabricamp.state import RunState, Stage
from fabricamp.strategies import strategy_from
from fabricamp.watchdog import interrupts
from fabricamp.workers import start_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from pathlib import Path

    from fabricamp.callbacks.base import Callback
    from fabricamp.loggers.base import Logger
    from fabricamp.precision.base import Precision
    from fabricamp.strategies.base import Strategy

__all__ = ["Trainer"]

logger_ = logging.getLogger("fabricamp")


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts with a :class:`TrainingModule`; argument names are Lightning's.

    ``strategy`` and ``precision`` take a name or an object with options.  Every argument is checked here; what depends on the
    module, its optimizers or the data is checked in ``fit`` before the first batch.  Raises :class:`ConfigError`.

    Example:
        >>> trainer = Trainer(max_epochs=3, precision="O1", accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = "O0",
        max_epochs: int | None = None,
        max_steps: int = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        fast_dev_run: int | bool = False,
        overfit_batches: float = 0.0,
        val_check_interval: float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
        nan_policy: str | None = None,
        logger: Logger | list[Logger] | bool | None = True,
        callbacks: list[Callback | str] | Callback | str | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        start_method: str = "auto",
        deterministic: bool | str = False,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        use_distributed_sampler: bool = True,
        per_sample_seed: bool = False,
        sync_batchnorm: bool = False,
        inference_mode: bool = True,
        default_root_dir: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in {"self", "unknown", "__class__"}}
        refuse_unknown(unknown, given)
        self.settings = check_settings(given)
        self._choose_processes(accelerator, devices, strategy)
        self.precision = precision_from("O0" if precision is None else precision, self.settings.nan_policy)
        self.precision.check_device(self.device_type)
        self.state = RunState()
        self.session: Session | None = None
        self.ckpt_path: str | None = None
        self.log_dir: str | None = None
        self.skipped_in_workers = 0
        found = as_loggers(logger)
        self.loggers = [TensorBoardLogger(self.settings.default_root_dir)] if found is None else found
        self._given_callbacks = as_callbacks(callbacks)
        enabled = {
            ModelCheckpoint: check_flag("enable_checkpointing", enable_checkpointing),
            ProgressBar: check_flag("enable_progress_bar", enable_progress_bar),
            ModelSummary: check_flag("enable_model_summary", enable_model_summary),
        }
        self._default_callbacks: list[Callback] = [kind() for kind, wanted in enabled.items() if wanted]
        if not enable_checkpointing and any(isinstance(one, ModelCheckpoint) for one in self._given_callbacks):
            raise ConfigError(
                "callbacks holds a ModelCheckpoint, but enable_checkpointing=False; leave one of them out"
            )
        if self.settings.fast_dev_run:
            self.loggers = []
        self._callbacks_of: TrainingModule | None = None
        self._own_callbacks: list[Callback] = []
        self.take_callbacks(None)

    def _choose_processes(self, accelerator: str, devices: int | str | list[int], strategy: str | Strategy) -> None:
        """Decides how many processes there are, on what, and whether this one has to start them."""
        self._environment = launch.detect()
        self.device_type, self._device_indices = launch.resolve_devices(accelerator, devices, self._environment)
        local = len(self._device_indices)
        launch.check_environment(self._environment, None if devices == "auto" else local, self.settings.num_nodes)
        world_size = local if self._environment is None else self._environment.world_size
        self.strategy = strategy_from(strategy, world_size)
        if self._environment is not None:
            self.strategy.environment = self._environment
        self.num_processes = local
        self._launches = self._environment is None and world_size > 1

    def become_worker(self) -> None:
        """Takes its rank from the variables that a starter has set; for workers that were forked or spawned with this Trainer."""
        self._environment = launch.detect() or self.strategy.environment
        self._launches = False

    def __getstate__(self) -> dict[str, Any]:
        """All but the last run, whose threads and loops stay in their process."""
        return {**self.__dict__, "session": None}

    def take_callbacks(self, module: TrainingModule | None) -> None:
        """Puts together the given ones, the module's in place of those of the same class, the default ones, monitors last."""
        if module is not None and module is not self._callbacks_of:
            # Once a module: what they have seen lasts from one run to the next, as with those that were given.
            found = module.configure_callbacks()
            self._callbacks_of, self._own_callbacks = (
                module,
                list(found) if isinstance(found, (list, tuple)) else [found],
            )
        own = self._own_callbacks
        replaced = {type(one) for one in own}
        callbacks = [one for one in self._given_callbacks if type(one) not in replaced] + own
        callbacks += [
            one for one in self._default_callbacks if not any(isinstance(other, type(one)) for other in callbacks)
        ]
        if self.settings.fast_dev_run:
            callbacks = [one for one in callbacks if not isinstance(one, ModelCheckpoint)]
        self.callbacks = sorted(callbacks, key=lambda one: (one.monitors, isinstance(one, ModelCheckpoint)))

    # -- the four entry points ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Trains from the start, or on from ``ckpt_path``: a path or URL, "last", "best", or "auto" ("last" where there is one)."""
        self.run(Stage.FIT, module, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(
        self,
        module: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Runs the validation loop once; returns the logged values, one dict a loader."""
        return self.run(Stage.VALIDATE, module, None, dataloaders, datamodule, ckpt_path, verbose=verbose)  # type: ignore[no-any-return]

    def test(
        self,
        module: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Runs the test loop once; returns the logged values, one dict a loader."""
        return self.run(Stage.TEST, module, None, dataloaders, datamodule, ckpt_path, verbose=verbose)  # type: ignore[no-any-return]

    def predict(
        self,
        module: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Returns what ``predict_step`` returned, batch by batch (of several loaders: a list each); those of every rank in turn."""
        return self.run(  # type: ignore[no-any-return]
            Stage.PREDICT, module, None, dataloaders, datamodule, ckpt_path, keep=return_predictions
        )

    def run(
        self,
        stage: Stage,
        module: TrainingModule | None,
        train: Any,
        evaluation: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        **options: bool,
    ) -> Any:
        """Runs one entry point, in this process or in workers; the four above are its faces."""
        module, source = self._check_call(stage, module, train, evaluation, datamodule)
        if self._launches:
            result = start_workers(self, stage, module, source, ckpt_path, options)
            self._leave_interrupted()
            return result
        self._enter(stage, module, source)
        session = self.session
        assert session is not None
        try:
            with (
                deterministic_mode(self.settings.deterministic, benchmark=self.settings.benchmark),
                self._anomalies(),
                # Before there are loader workers: these then leave Ctrl-C to this process.
                interrupts(session.agreement),
            ):
                session.attach()
                self.ckpt_path = resolve_checkpoint(self, None if ckpt_path is None else str(ckpt_path))
                session.open(self.ckpt_path)
                if stage is Stage.FIT:
                    session.fit_loop().run()
                    self._leave_fit(session)
                    result = None
                else:
                    result = session.evaluate(**options)
        except BaseException as error:
            self._fail(session, error)
            raise
        finally:
            self.state.stage = Stage.IDLE
        session.close(failed=False)
        self._leave_interrupted()
        return result

    # -- around a run ------------------------------------------------------------------------------------------------------------

    def _check_call(
        self, stage: Stage, module: TrainingModule | None, train: Any, evaluation: Any, datamodule: DataModule | None
    ) -> tuple[TrainingModule, Source]:
        if module is None and self.session is not None:
            module = self.session.module
            datamodule = datamodule or (self.session.source.datamodule if evaluation is None else None)
        name = stage.value
        if isinstance(train, DataModule):
            train, datamodule = None, train
        if isinstance(evaluation, DataModule):
            evaluation, datamodule = None, evaluation
        if not isinstance(module, TrainingModule):
            raise ConfigError(
                f"{name} got {type(module).__name__}; give a module whose class derives from fabricamp.TrainingModule"
            )
        if datamodule is not None and not isinstance(datamodule, DataModule):
            raise ConfigError(f"datamodule={datamodule!r} is not a fabricamp.DataModule; pass loaders as dataloaders")
        if datamodule is not None and (train is not None or evaluation is not None):
            raise ConfigError(f"{name} got loaders and a datamodule; give one of them")
        step = {Stage.FIT: "training_step", Stage.PREDICT: "predict_step"}.get(stage) or f"{KINDS[stage]}_step"
        if stage is not Stage.PREDICT and not overrides(module, step, TrainingModule):
            raise ConfigError(f"{type(module).__name__} has no {step}, which {name} needs; write one")
        if stage is Stage.FIT and not overrides(module, "configure_optimizers", TrainingModule):
            raise ConfigError(
                f"{type(module).__name__} has no configure_optimizers, which fit needs; return an optimizer from it, or None"
            )
        return module, Source(train=train, evaluation=evaluation, datamodule=datamodule, stage=stage)

    def _enter(self, stage: Stage, module: TrainingModule, source: Source) -> None:
        """Takes this process's place, and makes the session."""
        environment = self._environment or self.strategy.environment
        index = self._device_indices[environment.local_rank % len(self._device_indices)]
        device = torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, index)
        self.strategy.setup_environment(environment, device)
        self._agree_on_folders()
        self.take_callbacks(module)
        if stage is Stage.FIT:
            self.state = RunState()
        self.state.stage = stage
        self.state.started = time.monotonic()
        self.state.should_stop, self.state.stop_reason = False, ""
        self.session = Session(self, stage, module, source)
        self.session.watchdog.start()

    def _agree_on_folders(self) -> None:
        """One folder a logger for all ranks: rank 0 takes the next free one."""
        for one in self.loggers:
            if isinstance(one, RunFolderLogger):
                one.version = self.strategy.broadcast(one.version if self.is_global_zero else "")
        found = next((str(one.log_dir) for one in self.loggers if one.log_dir is not None), None)
        self.log_dir = self.strategy.broadcast(found or self.default_root_dir)

    def _leave_fit(self, session: Session) -> None:
        session.agreement.ended_early(here=self.interrupted)
        if self.interrupted:
            call_all(session.hooks.callbacks("on_exception"), KeyboardInterrupt(self.state.stop_reason))
        elif explanation := self.state.stop_explanation:
            call_all(session.hooks.callbacks("on_exception"), NonFiniteError(explanation))
            if self.is_global_zero:
                path = next((one.last_model_path for one in self.checkpoint_callbacks if one.last_model_path), "none")
                logger_.warning("fabricamp: %s; checkpoint: %s", explanation, path)
        self.precision.drain()
        check_peers()
        call_all(session.hooks("on_fit_end"))

    def _fail(self, session: Session, error: BaseException) -> None:
        launch.record_failure(error)
        session.watchdog.fail(error)
        if isinstance(error, KeyboardInterrupt):
            # In the middle of anything, perhaps of an update: no state to save.
            self.state.stage = Stage.IDLE
        try:
            call_all(session.hooks.callbacks("on_exception"), error)
            if session.source.datamodule is not None:
                session.source.datamodule.on_exception(error)
        finally:
            session.close(failed=True)

    def _leave_interrupted(self) -> None:
        """After a signal the process ends here (exit code 143); so does a script after Ctrl-C (130), a prompt gets its turn."""
        reason = self.state.stop_reason
        if not self.interrupted or (reason == "interrupted" and launch.interactive()):
            return
        path = next((one.last_model_path for one in self.checkpoint_callbacks if one.last_model_path), None)
        word = "Interrupted" if reason == "interrupted" else f"Ended by {reason}"
        self.print(f"{word} at step {self.global_step}" + (f"; checkpoint: {path}" if path else ""), flush=True)
        if reason == "SIGUSR1" and self.is_global_zero:
            print(f"fabricamp: {launch.requeue_job()}", flush=True)
        raise SystemExit(130 if reason == "interrupted" else launch.TERMINATED)

    def _anomalies(self) -> Any:
        return torch.autograd.set_detect_anomaly(True) if self.settings.detect_anomaly else contextlib.nullcontext()

    # -- what callbacks call -----------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether training is to end at the next step boundary; any rank may set it, all end at the same step."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if not value:
            self.state.should_stop = False
        elif self.world_size == 1 or self.session is None:
            self.stop("should_stop was set")
        else:
            self.session.agreement.request("should_stop was set")

    def stop(self, reason: str) -> None:
        """Ends training at the next step boundary; for decisions that every rank takes at the same place (else ``should_stop``)."""
        self.state.stop(reason)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        write: Callable[[str, dict[str, Any]], None] = write_checkpoint,
    ) -> None:
        """Writes a checkpoint: every rank calls it, rank 0 calls ``write``; raises :class:`CheckpointError` on every rank."""
        if self._launches:
            raise CheckpointError(
                "save_checkpoint after a run in workers: their optimizers are gone with them; use a ModelCheckpoint, or "
                "call it in a hook such as on_fit_end"
            )
        self._opened.save_checkpoint(str(filepath), weights_only=weights_only, write=write)

    def print(self, *args: Any, **options: Any) -> None:
        """Prints once, not once a process."""
        if self.is_global_zero:
            print(*args, **options)  # what this method is for
