"""The Trainer: checks its arguments, composes the parts, and runs fit, validate, test and predict."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Never

from fabricamp import launch
from fabricamp.callbacks._ckpt_path import best_of_last_fit
from fabricamp.cuda_graph import check_cuda_graph
from fabricamp.engine.ending import end_fit, leave_interrupted
from fabricamp.engine.forward_pass import forward_train_batches
from fabricamp.engine.run_file import recorded
from fabricamp.engine.runner import Runner
from fabricamp.engine.workers import start_workers
from fabricamp.errors import CheckpointError
from fabricamp.precision import precision_from
from fabricamp.profilers.choice import profiler_from
from fabricamp.state import RunState, TrainerFn
from fabricamp.strategies import strategy_from
from fabricamp.trainer.arguments import check_settings, refuse_unknown, refuse_unknown_data
from fabricamp.trainer.defaults import from_environment, with_defaults
from fabricamp.trainer.given_parts import as_callbacks, as_loggers, default_callbacks, of_plugins
from fabricamp.trainer.properties import TrainerProperties
from fabricamp.tuner.finders import search_first
from fabricamp.tuner.tuning import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from pathlib import Path

    from fabricamp.callbacks.base import Callback
    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.data import DataModule
    from fabricamp.loggers.base import Logger
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.profilers.profiler import Profiler
    from fabricamp.strategies.base import Environment, Strategy


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts with a :class:`TrainingModule`; argument names are Lightning's.

    None means an argument's default.  An environment variable such as ``PL_TRAINER_MAX_EPOCHS`` gives an argument that is left
    out.  Every argument is checked here; what depends on the module, its optimizers or the data is checked in ``fit``, before the
    first batch.

    Args:
        accelerator: "cpu", "gpu" ("cuda" is the same), or "auto": a GPU where there is one.
        devices: how many processes on this machine, one per GPU; -1 all GPUs; a list or "0,2" chooses GPUs; "auto" all GPUs, or
            one process on the CPU.  Under torchrun and SLURM the number that was started.
        num_nodes: how many machines.  torchrun or SLURM starts the processes on each.
        strategy: "single", "ddp", "delayed_ddp", "fsdp", "fault_tolerant", "auto" ("single" or "ddp"), or an object with options.
        precision: "O0" to "O5", Lightning's names such as "16-mixed" and "bf16-true", or an object such as ``OptLevel("O2")``.
        max_epochs: the epoch at which training ends; -1 for no limit.  By default 1000 if neither steps nor time are limited.
        max_steps: the step at which training ends; -1 for no limit.
        max_time: how long training may take: "DD:HH:MM:SS", a timedelta, or a dict such as ``{"hours": 2}``.
        min_epochs: the epochs that training lasts at least: early stopping and ``should_stop`` wait for them.
        min_steps: the steps that training lasts at least: early stopping and ``should_stop`` wait for them.
        limit_train_batches: batches per epoch at most (int), or a share of them (float).
        limit_val_batches: the same for each validation loader; 0 leaves validation out.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        fast_dev_run: a trial of so many batches (True: 1) of each kind, without logs, checkpoints and sanity check.
        overfit_batches: trains and validates on the same few batches (int), or this share of them (float), in each epoch: nothing
            is shuffled, and ``validation_step`` gets what ``training_step`` got.
        val_check_interval: validates after so many batches (int), or after each such share of an epoch (float).  By default 1.0.
            Also by words such as "100 steps, 1 epoch, 30 min", or after a time: a timedelta, "DD:HH:MM:SS" or a dict.
        check_val_every_n_epoch: validates in every n-th epoch; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches that are tried before training; -1 all, 0 none.
        log_every_n_steps: how many steps lie between two rows of logged values; 0 logs no step's values, only those of epochs.
        accumulate_grad_batches: micro-batches whose gradients make one step.
        partial_window: what happens to an incomplete window at the end of an epoch: "step" makes a step, "carry" continues it in
            the next epoch, "drop" discards its gradients.
        on_world_change: what a run that is resumed with more or fewer processes keeps: "keep_per_rank"
            (``accumulate_grad_batches``) or "keep_global_batch" (the samples of a step, by another ``accumulate_grad_batches``).
        gradient_clip_val: the largest norm, or absolute value, of gradients; None and 0 do not clip.
        gradient_clip_algorithm: "norm" (of all gradients together) or "value" (of each element).
        profiler: "simple" (a table of times), "pytorch" (a trace of a few steps), "memory" (a GPU's), an object, or None.
        nan_policy: what happens when gradients are inf or nan: "skip" the step, "stop" with a checkpoint, "raise"; None: a
            dynamic loss scale skips the step, any other precision does not check.
        logger: True (TensorBoard, below ``default_root_dir``), False, a logger or a list of them.
        callbacks: a callback, or a list of them.
        enable_checkpointing: adds a :class:`ModelCheckpoint` if ``callbacks`` has none.
        enable_progress_bar: adds a :class:`ProgressBar` if ``callbacks`` has none.
        enable_model_summary: adds a :class:`ModelSummary` if ``callbacks`` has none.
        start_method: how other processes start: "script" runs the script again, "spawn", "fork"; "auto" takes what fits.
        deterministic: torch's deterministic algorithms; "warn" warns of operations that have none, instead of an error.
        benchmark: cuDNN's search for the fastest algorithm; None leaves it as it is, or off with ``deterministic``.
        detect_anomaly: torch's anomaly detection, which finds the operation that a bad gradient came from, and is slow.
        use_distributed_sampler: shares loaders among processes; False: every process reads all of them.
        per_sample_seed: seeds augmentation by (seed, epoch, index), so it does not depend on workers and ranks.
        prefetch_batches: how many batches are moved to a GPU ahead of their steps, 0 to 2; your transfer hooks run ahead too.
        sync_batchnorm: BatchNorm over the batches of all processes.
        inference_mode: ``validate``, ``test`` and ``predict`` run under ``torch.inference_mode``; False: under ``torch.no_grad``.
        cuda_graph: True replays the training step as one CUDA graph, "auto" if possible; a :class:`CudaGraph` has options.
        plugins: a :class:`Precision` or an :class:`Environment` (which process this is), or a list of them; None for none.
        reload_dataloaders_every_n_epochs: makes the loaders anew every so many epochs; 0 makes them once.
        enable_autolog_hparams: gives loggers the hyper-parameters that ``save_hyperparameters`` saved.
        barebones: only trains: no logs, checkpoints, bar, summary, sanity check, profiler and ``self.log``.
        performance: "max", "safe" or a dict of ``tf32``, ``matmul_precision``, ``benchmark``, ``channels_last`` and ``hold_gc``.
        compile: True runs ``training_step`` through ``torch.compile``; a dict has its keywords.
        default_root_dir: where logs and checkpoints go; None is the current folder.

    Raises:
        ConfigError: for a wrong argument, with what is allowed.

    Example:
        >>> trainer = Trainer(max_epochs=3, precision="O1", accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    @from_environment
    def __init__(
        self,
        *,
        accelerator: str | None = "auto",
        devices: int | str | list[int] | None = "auto",
        num_nodes: int | None = 1,
        strategy: str | Strategy | None = "auto",
        precision: str | int | Precision | None = "O0",
        max_epochs: int | None = None,
        max_steps: int | None = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        fast_dev_run: int | bool | None = False,
        overfit_batches: float | None = 0.0,
        val_check_interval: float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        accumulate_grad_batches: int | None = 1,
        partial_window: str | None = "step",
        on_world_change: str | None = "keep_per_rank",
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
        profiler: Profiler | str | None = None,
        nan_policy: str | None = None,
        logger: Logger | list[Logger] | bool | None = True,
        callbacks: Sequence[Callback | str] | Callback | str | None = None,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        start_method: str | None = "auto",
        deterministic: bool | str | None = False,
        benchmark: bool | None = None,
        detect_anomaly: bool | None = False,
        use_distributed_sampler: bool | None = True,
        per_sample_seed: bool | None = False,
        prefetch_batches: int | None = 1,
        sync_batchnorm: bool | None = False,
        inference_mode: bool | None = True,
        cuda_graph: bool | str | CudaGraph | None = False,
        plugins: Precision | Environment | Sequence[Precision | Environment] | None = None,
        reload_dataloaders_every_n_epochs: int | None = 0,
        enable_autolog_hparams: bool | None = True,
        barebones: bool | None = False,
        performance: str | dict[str, Any] | None = None,
        compile: bool | dict[str, Any] | None = False,  # noqa: A002 - torch's name of it
        default_root_dir: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in {"self", "unknown", "__class__"}}
        refuse_unknown(unknown, given)
        settings = check_settings(given := with_defaults(given))
        given["precision"], environment = of_plugins(plugins, given["precision"])
        environment, indices = self._choose_processes(given, settings.num_nodes, environment)
        check_cuda_graph(settings, self.device_type, self.strategy)
        if settings.start_method == "auto":
            settings.start_method = self.strategy.start_method or "auto"
        self.precision_plugin = precision_from(given["precision"], settings.nan_policy, self.device_type)
        self.profiler = profiler_from(given["profiler"], self.device_type)
        self.state = RunState()
        self.ckpt_path: str | None = None
        self.log_dir: str | None = None
        self.log_folder: str | None = None
        self.loggers = as_loggers(logger, settings)
        own = as_callbacks(callbacks)
        self.callbacks: list[Callback] = []
        self._runner = Runner(self, settings, environment, indices, own, default_callbacks(given, own))

    def _choose_processes(
        self, given: dict[str, Any], num_nodes: int, environment: Environment | None
    ) -> tuple[Environment | None, list[int]]:
        """Decides how many processes there are, and on what; returns which of them this one is, and this node's devices."""
        environment, devices = environment or launch.detect(), given["devices"]
        self.device_type, indices = launch.resolve_devices(given["accelerator"], devices, environment)
        launch.check_environment(environment, None if devices == "auto" else len(indices), num_nodes)
        self.strategy = strategy_from(
            given["strategy"], len(indices) if environment is None else environment.world_size
        )
        if environment is not None:
            self.strategy.environment = environment
        return environment, indices

    # -- the four entry points ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        **unknown: Never,
    ) -> None:
        """Trains from the start, or resumes from a checkpoint.

        A second fit continues the counts of epochs and steps, with new optimizers.  If a limit is reached already, it says so and
        trains nothing; raise the limit with ``trainer.fit_loop.max_epochs = n``.  :meth:`reset` lets the next one count from 0.

        Args:
            model: the module to train.
            train_dataloaders: a loader, or a dict or list of loaders; None if the module or ``datamodule`` has them.
            val_dataloaders: a loader, or a list of loaders.
            datamodule: a :class:`DataModule` in place of loaders.
            ckpt_path: a path or URL, "last" (the furthest checkpoint), "best", or "auto" ("last" if there is one, else a new
                start).
            **unknown: refused, with the argument that is meant.
        """
        refuse_unknown_data("fit", unknown)
        self._run(TrainerFn.FITTING, model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)
        if self.state.stop_error is not None:
            raise self.state.stop_error

    def validate(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Runs the validation loop once; returns the logged values, one dict per loader.

        Args:
            model: the module, whose weights are taken as they are; None: that of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None leaves those of a module that
                is given; without a module it is the first :class:`ModelCheckpoint`'s best (without a monitor its newest), and
                :class:`MissingCheckpointError`, a ValueError, is raised where there is none.
            verbose: shows the values in a table.
            datamodule: a :class:`DataModule` in place of loaders.
            **unknown: refused, with the argument that is meant.
        """
        refuse_unknown_data("validate", unknown)
        return self._run(TrainerFn.VALIDATING, model, None, dataloaders, datamodule, ckpt_path, verbose=verbose)  # type: ignore[no-any-return]

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Runs the test loop once; returns the logged values, one dict per loader.

        Args:
            model: the module, whose weights are taken as they are; None: that of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None leaves those of a module that
                is given; without a module it is the first :class:`ModelCheckpoint`'s best (without a monitor its newest), and
                :class:`MissingCheckpointError`, a ValueError, is raised where there is none.
            verbose: shows the values in a table.
            datamodule: a :class:`DataModule` in place of loaders.
            **unknown: refused, with the argument that is meant.
        """
        refuse_unknown_data("test", unknown)
        return self._run(TrainerFn.TESTING, model, None, dataloaders, datamodule, ckpt_path, verbose=verbose)  # type: ignore[no-any-return]

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: str | Path | None = None,
        **unknown: Never,
    ) -> list[Any] | None:
        """Returns the outputs of ``predict_step`` on all ranks, batch by batch; for several loaders a list each.

        Args:
            model: the module, whose weights are taken as they are; None: that of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            datamodule: a :class:`DataModule` in place of loaders.
            return_predictions: False returns None, for a callback that writes them.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None leaves those of a module that
                is given; without a module it is the first :class:`ModelCheckpoint`'s best (without a monitor its newest), and
                :class:`MissingCheckpointError`, a ValueError, is raised where there is none.
            **unknown: refused, with the argument that is meant.
        """
        refuse_unknown_data("predict", unknown)
        keep = return_predictions is not False
        return self._run(TrainerFn.PREDICTING, model, None, dataloaders, datamodule, ckpt_path, keep=keep)  # type: ignore[no-any-return]

    def _run(
        self,
        fn: TrainerFn,
        module: TrainingModule | None,
        train: Any,
        evaluation: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        **options: bool,
    ) -> Any:
        """Runs one entry point, in this process or in workers; the four above are its faces."""
        runner = self._runner
        module_given = module is not None
        module, source = runner.check_call(fn, module, train, evaluation, datamodule)
        if not module_given and ckpt_path is None:
            # Before workers start: they are given the module and this file.
            ckpt_path = best_of_last_fit(self, fn.value)
            options["chosen"] = True
        if Tuner(self).searches_for_lightnings(module, source):
            return None
        result = None
        if runner.launches:
            run: Callable[[], Any] = functools.partial(
                self._run, fn, module, source.train, source.evaluation, source.datamodule, ckpt_path, **options
            )
            result = start_workers(runner, run, fn, module, source)
        else:
            runner.take_callbacks(module)
            search_first(self, module, source, ckpt_path)
            with runner.session_of(fn, module, source) as session:
                session.attach()
                session.open(*runner.resolve(ckpt_path))
                if fn is TrainerFn.FITTING:
                    loop = session.fit_loop()
                    with recorded(session):
                        loop.run()
                        end_fit(self, session, loop)
                else:
                    result = session.evaluate(**options)
        leave_interrupted(self)
        return result

    def reset(self) -> None:
        """Lets the next fit begin at epoch 0 and step 0, as a new Trainer's would.

        Loaders are asked for, and optimizers made, anew by every fit.  The module's weights stay, and so does what callbacks have
        counted (``EarlyStopping``'s patience, the best checkpoint): give new ones, as in ``trainer.callbacks[:] = [...]``.

        Example:
            >>> trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False)
            >>> trainer.reset()  # between two folds, say
            >>> trainer.current_epoch, trainer.global_step
            (0, 0)
        """
        self.state = RunState()

    # -- what callbacks call -----------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether training ends after this step; any rank may set it, and all end after the same one."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.state.ask("should_stop was set")
        else:
            self.state.should_stop = self.state.agreed = False

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """Ends training at the next step boundary; for decisions that every rank takes at the same place (else ``should_stop``).

        ``error`` is what ``fit`` raises then, once the run is over as any other.
        """
        self.state.stop(reason)
        self.state.stop_error = error or self.state.stop_error

    def reduce_step_metrics(self) -> None:
        """Brings ``monitored_metrics`` up to the values of the last step, waiting for them; every rank calls it, or none."""
        self._opened.metrics.reduce_steps(self.state.global_step)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        write: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        """Writes a checkpoint, or lets ``write`` do it: every rank calls it; raises :class:`CheckpointError` on every rank."""
        if self._runner.launches:
            raise CheckpointError(
                "save_checkpoint after a run in workers: their optimizers are gone with them; use a ModelCheckpoint, or "
                "call it in a hook such as on_fit_end"
            )
        self._opened.save_checkpoint(str(filepath), weights_only=weights_only, write=write)

    def replace_schedules(self, scheduler: Any) -> None:
        """Trains with ``scheduler``, which steps by epochs, and no other from here on; in hooks up to ``on_train_epoch_start``."""
        self._opened.replace_schedules(scheduler)

    def forward_train_batches(self) -> None:
        """Runs ``training_step`` on each batch of an epoch, without updates and logs; in hooks such as ``on_train_end``."""
        forward_train_batches(self._opened)

    def print(self, *args: Any, **options: Any) -> None:
        """Prints once, not once per process."""
        if self.is_global_zero:
            print(*args, **options)  # what this method is for
