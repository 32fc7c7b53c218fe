"""The Trainer: checks its arguments, composes the parts, and runs fit, validate, test and predict."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Never

from fabricamp import launch
from fabricamp._utils.files import keep_standard_descriptors
from fabricamp.arguments.private_methods import refuse_private_methods
from fabricamp.callbacks._verification import take_part
from fabricamp.cuda_graph import check_cuda_graph
from fabricamp.engine.ending import end_fit, leave_interrupted, reading_states
from fabricamp.engine.halving import check_halving
from fabricamp.engine.report.run_file import recorded, recorded_evaluation
from fabricamp.engine.runner import Runner
from fabricamp.engine.saved.ckpt_path import best_of_last_fit
from fabricamp.engine.update import forward_train_batches
from fabricamp.engine.workers import run_on_first, start_workers
from fabricamp.errors import CheckpointError, NothingToSaveError
from fabricamp.precision import precision_from
from fabricamp.profilers.base import profiler_from
from fabricamp.state import RunningStage, RunState, TrainerFn
from fabricamp.strategies import strategy_from
from fabricamp.strategies.base import Environment
from fabricamp.strategies.capabilities import check_class
from fabricamp.trainer.arguments import (
    check_settings,
    check_weights_only,
    from_environment,
    refuse_unknown,
    refuse_unknown_data,
    with_defaults,
)
from fabricamp.trainer.given_parts import as_callbacks, as_loggers, default_callbacks, give_checkpoint_io, of_plugins
from fabricamp.trainer.properties import TrainerProperties
from fabricamp.tuner.tuning import Tuner, search_first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from pathlib import Path

    from fabricamp._utils.types import StateDict
    from fabricamp.activations import Activations
    from fabricamp.callbacks.base import Callback
    from fabricamp.checkpoint import CheckpointIO
    from fabricamp.compilation import Compile
    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.data import DataModule
    from fabricamp.engine.planning import MemoryPlan
    from fabricamp.loggers.base import Logger
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.profilers.profiler import Profiler
    from fabricamp.strategies.base import Strategy


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts with a :class:`TrainingModule`; argument names are Lightning's.

    None means an argument's default.  An environment variable such as ``PL_TRAINER_MAX_EPOCHS`` sets an argument that is left
    out.  The constructor checks every argument; ``fit`` checks everything that depends on the module, its optimizers or the data,
    before the first batch.

    Args:
        accelerator: "cpu", "gpu" ("cuda" is the same), or "auto": a GPU if there is one.
        devices: the number of processes on this machine, one per GPU; -1: all GPUs; a list or "0,2": these GPUs; "auto": all GPUs,
            or one process on the CPU.  Under torchrun and SLURM: the number of processes that they started on this machine.
        num_nodes: the number of machines.  torchrun or SLURM starts the processes on each.
        strategy: "single", "ddp", "delayed_ddp", "fsdp", "fault_tolerant", "auto" ("single" or "ddp"), or an object with options.
        precision: "O0" to "O5", "fp8", Lightning's names such as "16-mixed", or an object such as ``OptLevel("O2")``.
        max_epochs: the epoch at which training ends; -1 for no limit.  By default 1000 if neither steps nor time are limited.
        max_steps: the step at which training ends; -1 for no limit.
        max_time: the longest duration of training: "DD:HH:MM:SS", a timedelta, or a dict such as ``{"hours": 2}``.
        min_epochs: the minimum number of epochs: early stopping and ``should_stop`` wait for them.
        min_steps: the minimum number of steps: early stopping and ``should_stop`` wait for them.
        limit_train_batches: the maximum number of batches per epoch (int), or a fraction of all batches (float).
        limit_val_batches: the same for each validation loader; 0 turns validation off.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        fast_dev_run: a trial run with this number of batches (True: 1) of each kind, without logs, checkpoints and sanity check.
        overfit_batches: trains and validates on the same batches in each epoch, this number (int) or fraction (float) of them:
            nothing is shuffled, and ``validation_step`` gets the batches of ``training_step``.
        val_check_interval: validates each time after this number of batches (int), or after this fraction of an epoch (float).  By
            default 1.0.  Also text such as "100 steps, 1 epoch, 30 min", or a time: a timedelta, "DD:HH:MM:SS" or a dict.
        check_val_every_n_epoch: validates in every n-th epoch; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: the number of validation batches to run before training; -1 all, 0 none.
        log_every_n_steps: the number of steps between two rows of logged values; 0 logs epoch values only.
        accumulate_grad_batches: the number of micro-batches whose gradients are accumulated for one step.
        partial_window: what happens to an incomplete accumulation at the end of an epoch: "step" makes a step, "carry" continues
            the accumulation in the next epoch, "drop" discards its gradients.
        on_world_change: what stays the same when a run resumes with more or fewer processes: "keep_per_rank" keeps
            ``accumulate_grad_batches``; "keep_global_batch" keeps the samples per step, and changes ``accumulate_grad_batches``.
        gradient_clip_val: the largest norm, or absolute value, of gradients; None and 0: no clipping.
        gradient_clip_algorithm: "norm" (of all gradients together) or "value" (of each element).
        profiler: "simple" (times), "advanced" (by function), "pytorch" (a trace of some steps), "memory" (a GPU's), an object.
        nan_policy: what happens when gradients are inf or nan: "skip" the step, "stop" with a checkpoint, "raise"; None: a
            dynamic loss scale skips the step, any other precision does not check.
        on_out_of_memory: what happens when forward or backward run out of memory: "raise", or "halve", which runs the micro-batch
            in two parts, or more, with the gradients of the whole.
        logger: True (TensorBoard, below ``default_root_dir``), False, a logger or a list of them.
        callbacks: a callback, or a list of them.
        enable_checkpointing: adds a :class:`ModelCheckpoint` if ``callbacks`` has none.
        enable_progress_bar: adds a :class:`ProgressBar` if ``callbacks`` has none.
        enable_model_summary: adds a :class:`ModelSummary` if ``callbacks`` has none.
        start_method: how the other processes start: "script" runs the script again, "spawn", "fork"; "auto" chooses one.
        deterministic: torch's deterministic algorithms; "warn": an operation without one warns instead of raising an error.
        benchmark: cuDNN's search for the fastest algorithm; None does not change the setting, but ``deterministic`` turns it off.
        detect_anomaly: torch's anomaly detection, which finds the operation that produced a bad gradient, and is slow.
        use_distributed_sampler: splits the samples of each loader among the processes; False: every process reads all samples.
        per_sample_seed: seeds augmentation by (seed, epoch, index), independent of workers and ranks.
        prefetch_batches: the number of batches to move to a GPU ahead of their steps, 0 to 2; your transfer hooks run ahead too.
        sync_batchnorm: BatchNorm statistics over the batches of all processes.
        inference_mode: ``validate``, ``test`` and ``predict`` run under ``torch.inference_mode``; False: under ``torch.no_grad``.
        cuda_graph: True replays the training step as one CUDA graph, "auto" does if possible; a :class:`CudaGraph` has options.
        plugins: a :class:`Precision`, an :class:`Environment` (the rank and world size) or a ``CheckpointIO`` of
            ``fabricamp.plugins.io`` (writes and reads checkpoints), or a list of them; None for none.
        reload_dataloaders_every_n_epochs: rebuilds the loaders each time after this number of epochs; 0 builds them once.
        enable_autolog_hparams: gives loggers the hyper-parameters that ``save_hyperparameters`` saved.
        checkpoint_objects: checkpoints hold objects too, such as a loss among the hyper-parameters; loading one then takes
            ``weights_only=False``.  None is False, and True in a script that runs by ``python -m fabricamp.lightning``.
        barebones: only trains: no logs, checkpoints, bar, summary, sanity check, profiler and ``self.log``.
        performance: "max", "safe" or a dict of ``tf32``, ``matmul_precision``, ``benchmark``, ``channels_last`` and ``hold_gc``.
        compile: True compiles the training step with ``torch.compile``, or as much of it as the precision and the strategy allow;
            "step", "modules" and "blocks" name the part; a :class:`Compile`, or a dict of its keywords, has options.
        activations: what the blocks of a network keep for backward: "keep", "recompute" (a block's inputs alone), "offload" (all
            of it, in host memory); an :class:`Activations`, or a dict of its keywords, has options.
        default_root_dir: where logs and checkpoints go; None is the current folder.

    Raises:
        ConfigError: for a wrong argument, with what is allowed.

    Example:
        >>> trainer = Trainer(max_epochs=3, precision="O1", accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_private_methods(cls)

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
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        fast_dev_run: int | bool | None = False,
        overfit_batches: int | float | None = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
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
        on_out_of_memory: str | None = "raise",
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
        plugins: Precision
        | Environment
        | CheckpointIO
        | Sequence[Precision | Environment | CheckpointIO]
        | None = None,
        reload_dataloaders_every_n_epochs: int | None = 0,
        enable_autolog_hparams: bool | None = True,
        checkpoint_objects: bool | None = None,
        barebones: bool | None = False,
        performance: str | dict[str, Any] | None = None,
        compile: bool | str | dict[str, Any] | Compile | None = False,  # noqa: A002 - torch's name of it
        activations: str | dict[str, Any] | Activations | None = "keep",
        default_root_dir: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in {"self", "unknown", "__class__"}}
        refuse_unknown(unknown, given)
        given = with_defaults(given, Trainer.__init__)
        settings = check_settings(given)
        given["precision"], environment, checkpoint_io = of_plugins(plugins, given["precision"])
        environment, indices, around = self._choose_processes(given, settings.num_nodes, environment)
        check_class(type(self.strategy))
        check_cuda_graph(settings, self.device_type, self.strategy)
        check_halving(settings, self.strategy)
        if settings.start_method == "auto":
            settings.start_method = self.strategy.start_method or "auto"
        self.precision_plugin = precision_from(given["precision"], settings.nan_policy, self.device_type)
        self.precision_plugin.check_strategy(self.strategy)
        self.profiler = profiler_from(given["profiler"], self.device_type)
        self.state = RunState()
        self.ckpt_path: str | None = None
        self.log_dir = None
        self.log_folder: str | None = None
        self.loggers = as_loggers(logger, settings)
        own = as_callbacks(callbacks)
        give_checkpoint_io(checkpoint_io, self.strategy, own)
        self.callbacks: list[Callback] = []
        self._runner = Runner(self, settings, environment, indices, own, default_callbacks(given, own), around)

    def _choose_processes(
        self, given: dict[str, Any], num_nodes: int, environment: Environment | None
    ) -> tuple[Environment | None, list[int], Environment | None]:
        """Sets device type and strategy; returns the environment (None if no launcher started this process) and device indices.

        Last comes the environment of the processes around this Trainer, if it runs on rank 0 alone.
        """
        environment, devices = environment or launch.detect(), given["devices"]
        self.device_type, indices = launch.resolve_devices(given["accelerator"], devices, environment)
        around = None
        if launch.runs_on_first(environment, len(indices)):
            around = environment
            environment = None
        launch.check_environment(environment, None if devices == "auto" else len(indices), num_nodes)
        self.strategy = strategy_from(
            given["strategy"], len(indices) if environment is None else environment.world_size
        )
        if environment is not None:
            self.strategy.environment = environment
        elif around is not None:  # so that a script's `if trainer.is_global_zero` is true on rank 0 alone
            self.strategy.environment = Environment(rank=around.rank)
        return environment, indices, around

    # -- the four entry points ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainingModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> None:
        """Trains from the start, or resumes from a checkpoint.

        A second fit continues the counts of epochs and steps, with new optimizers.  If a limit is reached already, ``fit`` says so
        and does not train; raise the limit with ``trainer.fit_loop.max_epochs = n``.  :meth:`reset` sets both counts to 0.
        Within a run of the same Trainer (in a hook, say) it raises :class:`ConfigError`: make another Trainer there.

        Args:
            model: the module to train.
            train_dataloaders: a loader, or a dict or list of loaders; None if the module or ``datamodule`` has them.
            val_dataloaders: a loader, or a list of loaders.
            datamodule: a :class:`DataModule` in place of loaders.
            ckpt_path: a path or URL, "last" (the checkpoint that got furthest), "best", or "auto" ("last" if there is one, else a
                new start).
            weights_only: False lets the checkpoint rebuild its objects by code: only for files that you trust.  None means True.
            **unknown: raises an error that names the argument to use instead.
        """
        refuse_unknown_data("fit", unknown)
        allowed = check_weights_only("fit", weights_only)
        self._runner.refuse_fit_within_a_run()
        self._run(TrainerFn.FITTING, model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, allowed)
        if self.state.stop_request.error is not None:
            raise self.state.stop_request.error

    def validate(
        self,
        model: TrainingModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Runs the validation loop once; returns the logged values, one dict per loader.

        Args:
            model: the module, with its current weights; None: the module of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None with a module: keeps the
                module's weights.  None without a module: loads the best checkpoint of the first :class:`ModelCheckpoint` (without a
                monitor: the newest); raises :class:`MissingCheckpointError`, a ValueError, if there is no checkpoint.
            verbose: shows the values in a table.
            datamodule: a :class:`DataModule` in place of loaders.
            weights_only: False lets the checkpoint rebuild its objects by code: only for files that you trust.  None means True.
            **unknown: raises an error that names the argument to use instead.
        """
        refuse_unknown_data("validate", unknown)
        allowed = check_weights_only("validate", weights_only)
        return self._run(  # type: ignore[no-any-return]
            TrainerFn.VALIDATING, model, None, dataloaders, datamodule, ckpt_path, allowed, verbose=verbose
        )

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Runs the test loop once; returns the logged values, one dict per loader.

        Args:
            model: the module, with its current weights; None: the module of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None with a module: keeps the
                module's weights.  None without a module: loads the best checkpoint of the first :class:`ModelCheckpoint` (without a
                monitor: the newest); raises :class:`MissingCheckpointError`, a ValueError, if there is no checkpoint.
            verbose: shows the values in a table.
            datamodule: a :class:`DataModule` in place of loaders.
            weights_only: False lets the checkpoint rebuild its objects by code: only for files that you trust.  None means True.
            **unknown: raises an error that names the argument to use instead.
        """
        refuse_unknown_data("test", unknown)
        allowed = check_weights_only("test", weights_only)
        return self._run(  # type: ignore[no-any-return]
            TrainerFn.TESTING, model, None, dataloaders, datamodule, ckpt_path, allowed, verbose=verbose
        )

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[Any] | None:
        """Returns the outputs of ``predict_step`` on all ranks, batch by batch; for several loaders: one list per loader.

        Args:
            model: the module, with its current weights; None: the module of the last run, with its best checkpoint's weights.
            dataloaders: a loader, or a list of loaders; None if the module or ``datamodule`` has them.
            datamodule: a :class:`DataModule` in place of loaders.
            return_predictions: False returns None; use it with a callback that writes the predictions.
            ckpt_path: the checkpoint to load the weights from, a path or URL, "best" or "last".  None with a module: keeps the
                module's weights.  None without a module: loads the best checkpoint of the first :class:`ModelCheckpoint` (without a
                monitor: the newest); raises :class:`MissingCheckpointError`, a ValueError, if there is no checkpoint.
            weights_only: False lets the checkpoint rebuild its objects by code: only for files that you trust.  None means True.
            **unknown: raises an error that names the argument to use instead.
        """
        refuse_unknown_data("predict", unknown)
        allowed = check_weights_only("predict", weights_only)
        keep = return_predictions is not False
        return self._run(  # type: ignore[no-any-return]
            TrainerFn.PREDICTING, model, None, dataloaders, datamodule, ckpt_path, allowed, keep=keep
        )

    def _run(
        self,
        fn: TrainerFn,
        module: TrainingModule | None,
        train: object,
        evaluation: object,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        weights_only: bool | None = None,
        **options: bool,
    ) -> Any:
        """Runs fit, validate, test or predict, in this process or in workers."""
        keep_standard_descriptors()
        runner = self._runner
        given = module
        module, source = runner.check_call(fn, module, train, evaluation, datamodule)
        if given is None and ckpt_path is None:
            # Resolved before workers start: they get the module and this path.
            ckpt_path = best_of_last_fit(self, fn.value)
            options["chosen"] = True
        if Tuner(self).searches_for_lightnings(module, source):
            return None
        result = None
        waits_for_first = runner.around is not None and not launch.is_on_first()
        if waits_for_first or runner.launches:
            # As given, which may be a compiled module: each worker compiles its own step.
            of_workers = module if given is None else given
            run: Callable[[], Any] = functools.partial(
                self._run,
                fn,
                of_workers,
                source.train,
                source.evaluation,
                source.datamodule,
                ckpt_path,
                weights_only,
                **options,
            )
            start = run_on_first if waits_for_first else start_workers
            result = start(runner, run, fn, module, source)
        else:
            with runner.runs(fn):
                runner.take_callbacks(module)
                if fn is TrainerFn.FITTING:
                    ckpt_path = take_part(self, runner.settings, ckpt_path)
                search_first(self, module, source, ckpt_path)
                with runner.session_of(fn, module, source) as session:
                    session.attach()
                    session.open(*runner.resolve(ckpt_path, weights_only=weights_only), weights_only=weights_only)
                    if fn is TrainerFn.FITTING:
                        loop = session.fit_loop()
                        resumed_from = self.ckpt_path if session.resumed else None
                        with recorded(session), reading_states(session.optimizers, resumed_from):
                            loop.run()
                            end_fit(self, loop, session.run_summary)
                    else:
                        result = recorded_evaluation(session, options)
        leave_interrupted(self)
        return result

    def plan(
        self,
        model: TrainingModule,
        train_dataloaders: object = None,
        datamodule: DataModule | None = None,
        card: str | None = None,
    ) -> MemoryPlan:
        """Returns the memory that a fit takes on a GPU, and what would take less; needs no GPU, and changes nothing.

        One step of ``model`` on the first batch is run without values, and its requests are placed as torch's allocator does.

        Args:
            model: the module to train.
            train_dataloaders: its loader; None if the module or ``datamodule`` has it.
            datamodule: a :class:`DataModule` in place of the loader.
            card: the name of the GPU, such as "H200"; None: the present one.

        Raises:
            ConfigError: for a card that is not known (with the table of those that are), for manual optimization, and for a step
                that needs the values of tensors.
        """
        from fabricamp.engine.planning import plan_memory

        module, source = self._runner.check_call(TrainerFn.FITTING, model, train_dataloaders, None, datamodule)
        self._runner.refuse_fit_within_a_run()
        return plan_memory(self, module, source, card)

    def reset(self) -> None:
        """Resets the counters: the next fit begins at epoch 0 and step 0, as with a new Trainer.

        Every fit asks for loaders and builds optimizers again.  The module's weights stay.  The state of callbacks stays too
        (``EarlyStopping``'s patience, the best checkpoint): replace the callbacks, as in ``trainer.callbacks[:] = [...]``.

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
        """Whether training ends after this step; any rank may set it, and all ranks end after the same step."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.state.ask("should_stop was set")
        else:
            self.state.should_stop = False
            self.state.stop_request.agreed = False

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """Ends training at the next step boundary; every rank has to call it at the same position (else set ``should_stop``).

        ``fit`` raises ``error``, if given, after it has ended the run in the usual way.
        """
        self.state.stop(reason)
        if error is not None:
            self.state.stop_request.error = error

    def reduce_step_metrics(self) -> None:
        """Updates ``monitored_metrics`` to the values of the last step, and waits for them; every rank has to call it, or none."""
        self._opened.metrics.reduce_steps(self.state.global_step)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        trainable_only: bool = False,
        write: Callable[[str, StateDict], None] | None = None,
    ) -> None:
        """Writes a checkpoint, or passes it to ``write``; every rank calls it; raises :class:`CheckpointError` on every rank.

        ``trainable_only`` leaves out frozen parameters, as :class:`ModelCheckpoint` does by this name.
        """
        if self._runner.launches:
            raise CheckpointError(
                "save_checkpoint after a run in workers: their optimizers are gone with them; use a ModelCheckpoint, or "
                "call it in a hook such as on_fit_end"
            )
        if self._runner.session is None:
            raise NothingToSaveError(
                f"save_checkpoint({str(filepath)!r}): the Trainer has no module yet; call it in or after fit, validate or test"
            )
        self._runner.for_all(
            functools.partial(
                self._opened.save_checkpoint,
                str(filepath),
                weights_only=weights_only,
                trainable_only=trainable_only,
                write=write,
            )
        )

    def replace_schedules(self, scheduler: object) -> None:
        """Replaces all schedulers by ``scheduler``, which steps once per epoch; call it in hooks up to ``on_train_epoch_start``."""
        self._opened.replace_schedules(scheduler)

    def forward_train_batches(self) -> None:
        """Runs ``training_step`` on each batch of an epoch, without updates and logs; call it in hooks such as ``on_train_end``."""
        forward_train_batches(self._opened)

    def print_results(self, results: list[dict[str, float]], stage: str) -> None:
        """Shows what ``validate`` or ``test`` returns, one dict per loader, as a table; override it to show it in another way.

        ``stage`` is "validate" or "test".  Called on rank 0, unless ``verbose=False`` was given.
        """
        loop = self.validate_loop if stage == RunningStage.VALIDATING else self.test_loop
        loop.show_results(results, stage)

    def print(self, *args: Any, **options: Any) -> None:
        """Prints once, not once per process."""
        if self.is_global_zero:
            print(*args, **options)
