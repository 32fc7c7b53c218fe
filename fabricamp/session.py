"""One fit, validate, test or predict of one module: opens the parts in Lightning's order, and gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricamp.checkpoint import (
    check_content,
    check_counters,
    check_optimizer_states,
    fitting,
    plain,
    read_together,
    step_due_schedules,
)
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.evaluation import EvaluationLoop, gather_predictions, print_results
from fabricamp.hooks import Hooks, call_all, overrides
from fabricamp.loggers.run_folder import RunFolderLogger
from fabricamp.loop import FitLoop
from fabricamp.manual_update import ClosureUpdate, ManualUpdate
from fabricamp.metrics import Metrics
from fabricamp.module import Attachment, TrainingModule
from fabricamp.nn.conversion import convert_syncbn_model, revert_syncbn_model
from fabricamp.ops.peer_memory import check_peers
from fabricamp.optimization import (
    ManagedOptimizer,
    SchedulerConfig,
    check_optimizers,
    parse_optimizers,
)
from fabricamp.parts import FitParts, limits_of
from fabricamp.precision.base import demands_closure
from fabricamp.resume import Moments
from fabricamp.rng import isolate_rng
from fabricamp.snapshot import (
    gather_counters,
    gather_training,
    gather_weights,
    restore_callbacks,
    restore_counters,
    restore_training,
    restore_weights,
)
from fabricamp.source import DataSource, Source
from fabricamp.state import Stage
from fabricamp.update import Update
from fabricamp.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.data import Feed
    from fabricamp.trainer import Trainer

__all__ = ["KINDS", "LOADERS", "Session"]

KINDS = {Stage.VALIDATE: "validation", Stage.TEST: "test", Stage.PREDICT: "predict"}
LOADERS = {"validation": "val", "test": "test", "predict": "predict"}


class Session:
    """The parts of one entry point's run on this process."""

    def __init__(self, trainer: Trainer, stage: Stage, module: TrainingModule, source: Source) -> None:
        self.trainer = trainer
        self.stage = stage
        self.module = module
        self.source = source
        self.settings = trainer.settings
        self.strategy = trainer.strategy
        self.precision = trainer.precision
        self.metrics = Metrics(trainer.state, trainer.strategy)
        self.moments = Moments(module, trainer.state, self.metrics, trainer.strategy)
        self.watchdog = Watchdog(trainer.state, trainer.strategy)
        self.agreement = self.watchdog.agreement
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.hooks = Hooks(trainer, module, trainer.callbacks)
        self.checkpoint: dict[str, Any] | None = None
        self._synchronised: list[nn.Module] = []
        self.data = DataSource(source, module, trainer.strategy, trainer.precision, trainer.settings)

    # -- opening, in order -------------------------------------------------------------------------------------------------------

    def open(self, ckpt_path: str | None) -> None:
        """Brings everything up to, not including, ``on_fit_start``; comes after :meth:`attach`."""
        self._prepare_data()
        self._call_setup("setup")
        self.module.configure_model()
        if ckpt_path is not None:
            self._load(ckpt_path)
        self.module.to(self.strategy.device)
        # Before any masters are taken: these have to be the same on every rank too.
        self.strategy.share_module(self.module)
        if self.settings.sync_batchnorm and self.strategy.world_size > 1:
            self._synchronise_batchnorm()
        self.precision.accumulating = self.settings.accumulate_grad_batches > 1 and self.module.automatic_optimization
        self.precision.convert_module(self.module)
        if ckpt_path is not None and self.module.dtype is torch.float64:
            self._load_weights(ckpt_path)  # once more: fp32 could not hold them
        if self.stage is Stage.FIT:
            self._open_optimizers()
            self._restore(ckpt_path)
        self._log_hyperparams()

    def attach(self) -> None:
        """Ties module and data to this run."""
        attachment = Attachment()
        attachment.trainer = self.trainer
        attachment.metrics = self.metrics
        self.attachment = attachment
        self.module.attach(attachment)
        if self.source.datamodule is not None:
            self.source.datamodule.trainer = self.trainer
        if self.trainer.is_global_zero:
            self.metrics.sinks.extend(one.log_metrics for one in self.trainer.loggers)

    def _prepare_data(self) -> None:
        if self.trainer.local_rank == 0:
            if self.source.datamodule is not None:
                self.source.datamodule.prepare_data()
            self.module.prepare_data()
        self.strategy.barrier("prepare_data")

    def _call_setup(self, name: str) -> None:
        """Callbacks, then the DataModule, then the module, for ``setup`` and ``teardown``."""
        stage = self.stage.value
        for call in self.hooks.callbacks(name):
            call(stage)
        if self.source.datamodule is not None:
            getattr(self.source.datamodule, name)(stage)
        getattr(self.module, name)(stage)

    def _load(self, path: str) -> None:
        """Reads the checkpoint and loads its weights, into fp32: the masters are taken from them."""
        self.checkpoint = read_together(path, self.module, self.strategy)
        call_all(self.hooks.callbacks("on_load_checkpoint"), self.checkpoint)
        self.module.on_load_checkpoint(self.checkpoint)
        self._load_weights(path)

    def _load_weights(self, path: str) -> None:
        assert self.checkpoint is not None
        with fitting(path, "weights"):
            restore_weights(self.module, self.checkpoint, path)

    def _synchronise_batchnorm(self) -> None:
        """Replaces every BatchNorm until :meth:`close`; those that the user made SyncBatchNorm stay what they are."""
        before = set(self.module.modules())
        convert_syncbn_model(self.module)
        self._synchronised = [one for one in self.module.modules() if one not in before]

    def _open_optimizers(self) -> None:
        module = self.module
        self.optimizers, self.schedulers = parse_optimizers(module.configure_optimizers())
        check_optimizers(self.optimizers, module)
        self._check_optimization()
        self.optimizers = self.strategy.setup_optimizers(self.optimizers)
        self.precision.setup_optimizers(module, self.optimizers, self.strategy)
        self.attachment.schedulers = [config.scheduler for config in self.schedulers]
        self.step = self.strategy.wrap_module(
            module,
            module.training_step,
            automatic=module.automatic_optimization,
            accumulates=self.settings.accumulate_grad_batches > 1 or self.precision.accumulation_buffers() is not None,
        )

    def _check_optimization(self) -> None:
        module, settings = self.module, self.settings
        if module.automatic_optimization and len(self.optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but automatic optimization takes one; set "
                "self.automatic_optimization = False in __init__ and step each one in training_step"
            )
        if not module.automatic_optimization and settings.accumulate_grad_batches > 1:
            raise ConfigError(
                "accumulate_grad_batches works with automatic optimization only; accumulate in training_step, or leave it out"
            )
        if not module.automatic_optimization and settings.clip is not None:
            raise ConfigError(
                "gradient_clip_val works with automatic optimization only; call self.clip_gradients(...) in training_step"
            )
        for optimizer in self.optimizers:
            if not demands_closure(optimizer):
                continue
            name = type(optimizer).__name__
            if settings.accumulate_grad_batches > 1:
                raise ConfigError(
                    f"{name} calls the forward itself, which cannot work with accumulate_grad_batches > 1; give 1"
                )
            if not module.automatic_optimization and self.strategy.world_size > 1:
                raise ConfigError(
                    f"{name} calls the forward itself, which cannot work with several processes under manual optimization; "
                    "use automatic optimization, or one process"
                )

    def _restore(self, path: str | None) -> None:
        if self.checkpoint is None:
            return
        with fitting(str(path), "state of callbacks, optimizers and counters"):
            check_counters(self.checkpoint, str(path))
            # A file that names none (apex's) leaves the schedules as they are.
            self.checkpoint.setdefault("lr_schedulers", [config.scheduler.state_dict() for config in self.schedulers])
            restore_callbacks(self.checkpoint, self.trainer.callbacks)
            restore_training(
                self.checkpoint, self.optimizers, self.schedulers, self.precision, self.source.datamodule, str(path)
            )
            check_optimizer_states(self.optimizers, str(path))
            step_due_schedules(self.checkpoint, self.schedulers)
            restore_counters(self.checkpoint, self.trainer.state)

    def _log_hyperparams(self) -> None:
        owners = [one for one in (self.source.datamodule, self.module) if one is not None and one.hparams]
        for owner in owners:
            # Before training, not at the first checkpoint.
            check_content(plain(dict(owner.hparams)), f"hyper-parameters of {type(owner).__name__}")
        logged = {name: value for one in owners if one.logs_hyperparameters for name, value in one.hparams.items()}
        if logged and self.trainer.is_global_zero:
            for one in self.trainer.loggers:
                one.log_hyperparams(plain(logged))

    # -- loops -------------------------------------------------------------------------------------------------------------------

    def fit_loop(self) -> FitLoop:
        """Runs what comes before the first batch, and returns the loop."""
        call_all(self.hooks("on_fit_start"))
        if self.settings.num_sanity_val_steps and self.trainer.state.global_step == 0:
            self._sanity_check()
        length = self.data.num_training_batches
        evaluate = bool(self.data.evaluation_loaders("val")) and overrides(
            self.module, "validation_step", TrainingModule
        )
        parts = FitParts(
            module=self.module,
            state=self.trainer.state,
            strategy=self.strategy,
            precision=self.precision,
            metrics=self.metrics,
            hooks=self.hooks,
            agreement=self.agreement,
            feed=self.data.feed(self.data.train_loader, length),
            loader=self.data.train_loader,
            step=self.step,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            clip=self.settings.clip,
            limits=limits_of(self.settings, length, self.trainer.state.started),
            validate=self._validate if evaluate else None,
            moments=self.moments,
        )
        update = self._open_update(parts)
        self.moments.begin(parts.feed, update)
        if self.checkpoint is not None:
            with fitting(str(self.trainer.ckpt_path), "position in training"):
                self.moments.restore(self.checkpoint)
            self.checkpoint = None  # as large as the model
        return FitLoop(parts, update)

    def _open_update(self, parts: FitParts) -> Update:
        """Chooses how updates are made, and gives the module its part in it."""
        if self.module.automatic_optimization:
            self.attachment.optimizers = [ManagedOptimizer(one) for one in self.optimizers]
            closure = bool(self.optimizers) and demands_closure(self.optimizers[0])
            return ClosureUpdate(parts) if closure else Update(parts)
        update = ManualUpdate(parts)
        self.attachment.manual_backward, self.attachment.manual_clip = update.backward, update.clip
        self.attachment.optimizers = [ManagedOptimizer(one, update.step) for one in self.optimizers]
        return update

    def evaluation_loop(self, kind: str) -> tuple[EvaluationLoop, list[Feed]]:
        """Returns the loop for ``kind`` ("validation", "test" or "predict") and what it runs over."""
        name = LOADERS[kind]
        loaders, lengths = self.data.evaluation(name)
        loop = EvaluationLoop(
            kind,
            module=self.module,
            precision=self.precision,
            state=self.trainer.state,
            metrics=self.metrics,
            hooks=self.hooks,
            agreement=self.agreement,
            inference_mode=self.settings.inference_mode,
        )
        return loop, [
            self.data.feed(loader, length, index)
            for index, (loader, length) in enumerate(zip(loaders, lengths, strict=True))
        ]

    def _sanity_check(self) -> None:
        state = self.trainer.state
        if not overrides(self.module, "validation_step", TrainingModule):
            return
        state.stage = Stage.SANITY
        with isolate_rng():
            call_all(self.hooks("on_sanity_check_start"))
            loop, feeds = self.evaluation_loop("validation")
            for feed in feeds:
                feed.limit = min(feed.limit, self.settings.num_sanity_val_steps)
            if feeds:
                self.metrics.clear_evaluation()
                loop.run(feeds)
            call_all(self.hooks("on_sanity_check_end"))
        state.stage = Stage.FIT

    def _validate(self) -> bool:
        """Runs validation within fit; returns whether a stop cut it short."""
        if not hasattr(self, "_validation"):
            self._validation = self.evaluation_loop("validation")
        loop, feeds = self._validation
        self.metrics.clear_evaluation()
        self.moments.begin_validation()
        self.trainer.state.validating_in_fit = True
        try:
            loop.run(feeds)
        finally:
            self.trainer.state.validating_in_fit = False
        self.moments.end_validation(cut_short=loop.cut_short)
        return loop.cut_short

    # -- evaluation as an entry point --------------------------------------------------------------------------------------------

    def evaluate(self, *, verbose: bool = False, keep: bool = False) -> Any:
        """Runs ``validate``, ``test`` or ``predict``, and returns what that returns."""
        kind = KINDS[self.stage]
        loop, feeds = self.evaluation_loop(kind)
        if not feeds:
            raise ConfigError(
                f"there is nothing to {self.stage.value}: pass dataloaders or a datamodule, or write {LOADERS[kind]}_dataloader"
            )
        outputs = loop.run(feeds, keep=keep)
        state = self.trainer.state
        if self.stage is Stage.PREDICT:
            return gather_predictions(self.strategy.all_gather_object(outputs)) if keep else None
        results = self.metrics.evaluation_results(len(feeds))
        if verbose and self.trainer.is_global_zero and not state.should_stop:
            print_results(kind, results)
        return results

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, filepath: str, *, weights_only: bool, write: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Lets rank 0 ``write`` a checkpoint; every rank calls it, and every rank raises where it fails."""
        check_peers()  # nothing is kept that was computed without a rank
        trainer, datamodule = self.trainer, self.source.datamodule
        checkpoint = gather_weights(self.module, self.strategy, self.precision, datamodule)
        checkpoint.update(gather_counters(trainer.state, self.moments.repeated_batches()))
        if not weights_only:
            checkpoint.update(
                gather_training(self.optimizers, self.schedulers, self.precision, trainer.callbacks, datamodule)
            )
            self.moments.save(checkpoint)
        call_all(self.hooks.callbacks("on_save_checkpoint"), checkpoint)
        self.module.on_save_checkpoint(checkpoint)
        failure = ""
        if trainer.is_global_zero:
            try:
                write(filepath, checkpoint)
            except CheckpointError as error:
                failure = str(error)
        if failure := self.strategy.broadcast(failure):
            raise CheckpointError(failure)

    # -- closing -----------------------------------------------------------------------------------------------------------------

    def close(self, *, failed: bool) -> None:
        """Gives the parts back; after a failure only what cannot fail on its own."""
        self.watchdog.close()
        self.data.close()
        if not failed:
            self._call_setup("teardown")
        self.attachment.manual_backward = self.attachment.manual_clip = None
        self.moments.end()
        self.precision.restore_module(self.module)
        revert_syncbn_model(self.module, self._synchronised)
        if not failed or self.strategy.world_size == 1:
            # After a failure the other ranks may be anywhere: leaving the group would wait for them.
            self.strategy.teardown()
        for one in self.trainer.loggers:
            if self.trainer.is_global_zero:
                one.save()
                one.close()
                if failed and isinstance(one, RunFolderLogger):
                    one.give_back()
