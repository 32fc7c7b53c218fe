"""One fit, validate, test or predict of one module: sets up the parts in Lightning's order, and releases them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.checkpoint import read_together, write_together
from fabricamp.checkpoint.shards import sharded_weights
from fabricamp.data import draw_a_pass, release_workers, set_epoch
from fabricamp.engine.checkpoint_sections import CALLBACKS, POSITION, TRAINING, WEIGHTS_ONLY, record_of
from fabricamp.engine.compiled import step_of
from fabricamp.engine.evaluation import EvaluationLoop, gather_predictions, print_results
from fabricamp.engine.graph.graphs import Graphs
from fabricamp.engine.graph.group_update import GroupUpdate
from fabricamp.engine.graph.refusals import graph_refusal, group_refusal, refused
from fabricamp.engine.graph.update import GraphUpdate
from fabricamp.engine.logger_setup import join_loggers, kept_of, log_hyperparams
from fabricamp.engine.loop import TrainingLoop
from fabricamp.engine.manual_update import ClosureUpdate, ManualUpdate
from fabricamp.engine.model_checks import warn_of_oversights
from fabricamp.engine.optimizer_setup import (
    ManagedOptimizer,
    SchedulerConfig,
    check_optimization,
    check_optimizers,
    parse_optimizers,
)
from fabricamp.engine.parts import FitParts, limits_of
from fabricamp.engine.performance import give_back
from fabricamp.engine.prediction_record import PredictionRecord, open_record
from fabricamp.engine.profiling import profile_evaluation, profile_fit, profile_train_feed
from fabricamp.engine.resume import ResumePoint
from fabricamp.engine.run_context import DETACHED
from fabricamp.engine.run_summary import RunSummary
from fabricamp.engine.schedules import check_schedule_lengths, schedule_lengths
from fabricamp.engine.sharding_checks import check_saving, shard_module
from fabricamp.engine.source import DataSource, GivenData
from fabricamp.engine.update import Update
from fabricamp.engine.world_change import keep_samples_of_a_step
from fabricamp.errors import ConfigError
from fabricamp.hooks import Hooks, call_all, overrides
from fabricamp.lightning.lending import attach
from fabricamp.loggers.logger_collection import LoggerCollection
from fabricamp.metrics import Metrics
from fabricamp.module import TrainingModule
from fabricamp.nn.conversion import convert_syncbn_model, revert_syncbn_model
from fabricamp.ops.peer_memory import check_peers
from fabricamp.precision.base import NOT_CONVERTED
from fabricamp.precision.stepper import demands_closure
from fabricamp.rng import isolate_rng
from fabricamp.state import RunningStage, TrainerFn
from fabricamp.watchdog import Watchdog, leave_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.checkpoint.record import Record
    from fabricamp.data import Feed
    from fabricamp.engine.runner import Runner
    from fabricamp.state import RunState


# ~~~ from engine.log_axis: Places values on the loggers' axis: at the number of their step, from 0, with the epoch as one more value.


def deliver(state: RunState, delivery: LoggerCollection, values: Mapping[str, float], step: int) -> None:
    """Logs the values of a flush, an epoch or an evaluation, as Lightning does; a value called "step" sets the axis position.

    ``step`` is the number of optimizer steps done.
    """
    rest = {name: value for name, value in values.items() if name != "step"}
    if "step" in values:
        delivery.log_metrics(rest, int(values["step"]))
    else:
        delivery.log_metrics({"epoch": state.epoch, **rest}, state.place_of(step))


# ~~~ from engine.reloading: Makes a feed of the training loader, and replaces it in epochs that reload their loaders.


def train_feed(session: Session) -> Feed:
    """Returns the feed of a fit's training batches."""
    data = session.data
    return profile_train_feed(session.trainer, data.feed(data.train_loader, data.num_training_batches))


def renew(session: Session, parts: FitParts) -> None:
    """Called before an epoch: sets its ``accumulate_grad_batches``, and its loaders if the epoch reloads them."""
    session.settings.begin_epoch(session.trainer.state.epoch)
    if not session.data.renew():
        return
    session.forget_validation()
    if parts.feed is session.data.train_feed:  # given loaders are not reloaded
        return
    parts.loader, parts.feed = session.data.train_loader, train_feed(session)
    parts.limits = limits_of(session.settings, session.data.num_training_batches, session.trainer.state.started)
    session.resume_point.use(parts.feed)


# ~~~ from engine.update_choice: Chooses how the updates of a fit are made: automatic or manual optimization, by closures, eagerly or as a CUDA graph.


def open_update(parts: FitParts, session: Session) -> Update:
    """Returns the update object of ``session``; under manual optimization, gives the module the methods that it calls.

    Raises :class:`ConfigError` if a CUDA graph is required and impossible.
    """
    parts.state.runs_as = ""
    captures = _captures(parts, session)
    if not session.module.automatic_optimization:
        update = ManualUpdate(parts)
        session.attachment.manual_backward, session.attachment.manual_clip = update.backward, update.clip
        for one in session.attachment.optimizers:
            one.update = update.step
        return update
    if captures:
        session.graphs.update = (GroupUpdate if _launches_together(parts, session) else GraphUpdate)(parts, session)
        return session.graphs.update
    closure = bool(parts.optimizers) and demands_closure(parts.optimizers[0])
    return ClosureUpdate(parts) if closure else Update(parts)


def _launches_together(parts: FitParts, session: Session) -> bool:
    options = session.settings.cuda_graph
    if options is None or options.steps == 1:
        return False
    reason = group_refusal(parts, session.trainer.callbacks)
    what = f"CudaGraph(steps={options.steps})"
    if reason and options.required:
        raise ConfigError(f"cuda_graph: {what}: {reason}; or give steps=1, which launches each step by itself")
    if reason:
        session.run_summary.say(f"{what} launches each step by itself: {reason}")
    return not reason


def _captures(parts: FitParts, session: Session) -> bool:
    options = session.settings.cuda_graph
    if options is None:
        return False
    reason = graph_refusal(parts)
    if reason and options.required:
        raise refused(reason)
    if reason:
        session.run_summary.say(f"cuda_graph='auto' runs eagerly: {reason}")
        parts.state.runs_as = "eager"
    return not reason


KINDS = {TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
LOADERS = {"validation": "val", "test": "test", "predict": "predict"}


class Session:
    """The parts of one entry point's run on this process."""

    def __init__(self, runner: Runner, fn: TrainerFn, module: TrainingModule, source: GivenData) -> None:
        trainer, settings = runner.trainer, runner.settings
        self.trainer, self.fn = trainer, fn
        self.module, self.source = module, source
        self.settings = settings
        self.strategy = trainer.strategy
        self.precision = trainer.precision_plugin
        self.conversion = NOT_CONVERTED
        self.metrics = Metrics(trainer.state, trainer.strategy)
        self.delivery = LoggerCollection(trainer.loggers if trainer.is_global_zero else ())
        self.resume_point = ResumePoint(
            module, trainer.state, self.metrics, trainer.strategy, self.delivery, trainer.callbacks
        )
        self.watchdog = Watchdog(trainer.state, trainer.strategy)
        self.agreement = self.watchdog.agreement
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.hooks = Hooks(trainer, module, trainer.callbacks)
        self.checkpoint: dict[str, Any] | None = None
        self.resumed = self.closed = False
        self.attachment = DETACHED  # until attach
        self.step: Callable[..., Any] = module.training_step  # in fit: as wrapped by the strategy
        self._validation: tuple[EvaluationLoop, list[Feed]] | None = None  # of the validation within fit
        self._synchronised: list[nn.Module] = []
        self._channels_last: list[nn.Parameter] = []
        self.graphs = Graphs(self)
        self.predicted: PredictionRecord | None = None
        self.data = DataSource(source, module, self.strategy, self.precision, settings, trainer.state)
        self.run_summary = RunSummary(self)

    @property
    def record(self) -> Record:
        """The state of this run, as a checkpoint holds it."""
        return record_of(self)

    # -- opening, in order -------------------------------------------------------------------------------------------------------

    def open(self, ckpt_path: str | None, checkpoint: dict[str, Any] | None) -> None:
        """Sets up everything before ``on_fit_start``; ``checkpoint`` is the content of ``ckpt_path`` if it was read already."""
        self.checkpoint = checkpoint
        if self.fn is TrainerFn.FITTING:
            # Gradients of an earlier fit, which may have failed within an accumulation, must not enter this fit's sums.
            self.module.zero_grad()
        self._prepare_data()
        self._call_setup("setup")
        self.precision.forward(self.module.configure_model)
        if self.settings.sync_batchnorm and self.strategy.world_size > 1:
            self._synchronise_batchnorm()  # before the module may be sharded
        shard_module(self, filled_later=ckpt_path is not None)
        private = any(one.logged and one.private for _, one in kept_of(self))
        for logger in self.trainer.loggers:
            # Set before loggers write or reopen a file.  A logger that has shown private values shows them in a later run too.
            logger.private = logger.private or private
        if ckpt_path is not None:
            self._load(ckpt_path)
        self.metrics.forget_earlier()
        self.strategy.place_module(self.module)
        if self.settings.performance is not None:
            self._channels_last = self.settings.performance.convert(self.module)
        # Before master weights are taken, since these have to be the same on every rank too.
        self.strategy.share_module(self.module)
        self.conversion = self.precision.convert_module(self.module) or NOT_CONVERTED
        self.attachment.show_dtypes()
        if ckpt_path is not None and self.module.dtype is torch.float64:
            self._restore("weights")  # again: the first time they were rounded to fp32
        if self.fn is TrainerFn.FITTING:
            keep_samples_of_a_step(self)
            self._open_optimizers()
            # Callbacks first: they add parameter groups and replace the schedule, to which the states restored below belong.
            self._restore(*CALLBACKS)
            self._wrap_step()
            lengths = schedule_lengths(self.schedulers)
            self._restore(*TRAINING)
            check_schedule_lengths(self.trainer, lengths)
            if ckpt_path is not None and self.trainer.loggers:
                join_loggers(self.trainer)  # a logger may continue the checkpoint's run
        else:
            self._restore("callbacks")
        log_hyperparams(self)
        if self.fn is TrainerFn.FITTING:
            self.delivery.begin(self.module)

    def attach(self) -> None:
        """Attaches module and data to this run; from here on signals may end it."""
        self.agreement.guard()
        fits = self.fn is TrainerFn.FITTING
        metrics = None if self.settings.barebones else self.metrics
        self.attachment = attach(self.module, self.source, self.trainer, metrics, fits=fits)
        self.strategy.attach(self)
        self.metrics.sinks.append(partial(deliver, self.trainer.state, self.delivery))

    def _prepare_data(self) -> None:
        if self.trainer.local_rank == 0:
            if self.source.datamodule is not None:
                self.source.datamodule.prepare_data()
            self.module.prepare_data()
        self.strategy.barrier("prepare_data")

    def _call_setup(self, name: str) -> None:
        """Calls ``setup`` or ``teardown`` of the DataModule first, as callbacks may look at its data; of the module last."""
        data = [one for one in (self.source.datamodule,) if one is not None]
        for call in (*(getattr(one, name) for one in data), *self.hooks.callbacks(name), getattr(self.module, name)):
            call(self.fn.value)

    def _load(self, path: str) -> None:
        """Reads the checkpoint and loads its weights into the fp32 module, from which master weights are taken."""
        if self.checkpoint is None:
            self.checkpoint = read_together(path, self.strategy)
        if self.strategy.checkpoint_form == "folder":
            self.checkpoint = sharded_weights(self.checkpoint, path, self.module.state_dict())
        call_all(self.hooks.callbacks("on_load_checkpoint"), self.checkpoint)
        self.module.on_load_checkpoint(self.checkpoint)
        # The DataModule's state too: configure_optimizers may ask for loaders, to learn the number of steps.
        self._restore("weights", "datamodule")

    def _restore(self, *sections: str) -> None:
        if self.checkpoint is not None:
            self.record.restore(self.checkpoint, str(self.trainer.ckpt_path), *sections)

    def _synchronise_batchnorm(self) -> None:
        """Replaces every BatchNorm by SyncBatchNorm until :meth:`give_back`; the user's own SyncBatchNorm modules stay."""
        before = set(self.module.modules())
        convert_syncbn_model(self.module)
        self._synchronised = [one for one in self.module.modules() if one not in before]

    def _open_optimizers(self) -> None:
        module = self.module
        own_step = overrides(module, "lr_scheduler_step", TrainingModule)
        self.optimizers, self.schedulers = parse_optimizers(module.configure_optimizers(), own_step=own_step)
        check_optimizers(self.optimizers, module)
        check_optimization(self.optimizers, module, self.settings, self.strategy.world_size)
        self.optimizers = self.strategy.setup_optimizers(self.optimizers)
        state = self.trainer.state
        skipped, state.skipped_before = self.trainer.skipped_steps, 0
        self.precision.setup_optimizers(module, self.optimizers, self.strategy, accumulates=self.settings.accumulates)
        state.skipped_before = skipped - self.trainer.skipped_steps  # a second fit's scaler counts from 0
        self.attachment.optimizers = [ManagedOptimizer(one, module) for one in self.optimizers]
        self.attachment.schedulers = [config.scheduler for config in self.schedulers]

    def replace_schedules(self, scheduler: Any) -> None:
        """Replaces all schedulers by one that steps per epoch; for hooks before an epoch."""
        self.schedulers[:] = [SchedulerConfig(scheduler)]
        self.attachment.schedulers = [scheduler]

    def _wrap_step(self) -> None:
        self.graphs.enter_stream()
        # This also takes in parameter groups that callbacks added, so that their state is loaded for fp32 masters.
        memories = [self.precision.gradients(one) for one in self.optimizers]
        sums = any(memory.flat is not None for memory in memories)
        self.step = self.strategy.wrap_module(
            self.module,
            step_of(self),
            automatic=self.module.automatic_optimization,
            accumulates=self.settings.accumulates or sums,
        )

    # -- loops -------------------------------------------------------------------------------------------------------------------

    def fit_loop(self) -> TrainingLoop:
        """Does the work before the first batch (``on_fit_start``, sanity check, loaders, resume point); returns the loop."""
        if self.trainer.is_global_zero:
            warn_of_oversights(self.module, self.optimizers, self.source.datamodule, self.trainer.callbacks)
        self.run_summary.begin()
        call_all(self.hooks("on_fit_start"))
        if self.settings.num_sanity_val_steps and (self.checkpoint is None or self.trainer.state.batches_done == 0):
            self._sanity_check()
        self.settings.begin_epoch(self.trainer.state.epoch)  # a resumed run knows its epoch only now
        self.data.renew()
        if self.settings.num_sanity_val_steps and self.trainer.enable_validation and self.data.defines("val"):
            # A new run has asked for these loaders in its sanity check.  A resumed run asks here, so that every run asks for them
            # first, and with the RNG state that the sanity check of the cut run had.
            with isolate_rng():
                self.data.evaluation_loaders("val")
        if self.trainer.state.epoch and self.checkpoint is None:
            # A second fit: Lightning begins a pass here and drops it; the orders that follow are drawn after it.
            draw_a_pass(self.data.train_loader)
        parts = self._fit_parts()
        update = open_update(parts, self)
        self.resume_point.begin(parts.feed, update)
        self.resumed = self.checkpoint is not None
        self._restore(*POSITION)
        self.checkpoint = None  # as large as the model
        return profile_fit(self, TrainingLoop(parts, update))

    def _fit_parts(self) -> FitParts:
        """Returns the loop's parts; asks for the training loader before the validation loaders."""
        length = self.data.num_training_batches
        self.run_summary.workers(self.data.train_loader)
        self.run_summary.rows()
        evaluate = bool(self.data.evaluation_loaders("val")) and overrides(
            self.module, "validation_step", TrainingModule
        )
        return FitParts(
            module=self.module,
            state=self.trainer.state,
            strategy=self.strategy,
            precision=self.precision,
            metrics=self.metrics,
            hooks=self.hooks,
            agreement=self.agreement,
            requests=self.watchdog.requests,
            feed=train_feed(self),
            loader=self.data.train_loader,
            step=self.step,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            clip=self.settings.clip,
            limits=limits_of(self.settings, length, self.trainer.state.started),
            validate=self._validate if evaluate else None,
            resume_point=self.resume_point,
            together=self.watchdog.together,
            meet_at_end_of_data=self.watchdog.meet_at_end_of_data,
            renew=partial(renew, self),
        )

    def evaluation_loop(self, kind: str) -> tuple[EvaluationLoop, list[Feed]]:
        """Returns the loop for ``kind`` ("validation", "test" or "predict") and its feeds."""
        name = LOADERS[kind]
        loaders, lengths = self.data.evaluation(name)
        record = self.predicted = open_record(self.trainer, loaders) if kind == "predict" else None
        loop = EvaluationLoop(
            kind,
            module=self.module,
            precision=self.precision,
            state=self.trainer.state,
            metrics=self.metrics,
            hooks=self.hooks,
            agreement=self.agreement,
            together=self.watchdog.together,
            # Not within fit, as in Lightning: tensors kept from a validation may be used in training.
            inference_mode=self.settings.inference_mode and self.fn is not TrainerFn.FITTING,
            record=record,
        )
        loop.forward = self.graphs.evaluation(kind, loop.forward)
        feeds = [
            self.data.feed(loader, length, index, begun=self.resumed and self.trainer.state.validations > 0)
            for index, (loader, length) in enumerate(zip(record.loaders if record else loaders, lengths, strict=True))
        ]
        return profile_evaluation(self.trainer, loop, kind, feeds), feeds

    def _sanity_check(self) -> None:
        state = self.trainer.state
        if not (self.trainer.enable_validation and self.data.defines("val")):
            return
        state.stage = RunningStage.SANITY_CHECKING
        with isolate_rng():
            call_all(self.hooks("on_sanity_check_start"))
            loop, feeds = self.evaluation_loop("validation")
            for feed in feeds:
                feed.limit = min(feed.limit, self.settings.num_sanity_val_steps)
            if feeds:
                self.metrics.clear_evaluation()
                loop.run(feeds)
            for loader in self.data.evaluation_loaders("val"):
                release_workers(loader)  # the first validation starts its own workers, with the RNG draws of that
            call_all(self.hooks("on_sanity_check_end"))
            self.metrics.forget()
        state.stage = RunningStage.TRAINING

    def forget_validation(self) -> None:
        """Makes the next validation ask for its loaders again."""
        self._validation = None

    def _validate(self) -> bool:
        """Runs validation within fit; returns whether a stop cut it short."""
        if self._validation is None:
            self._validation = self.evaluation_loop("validation")
        loop, feeds = self._validation
        if self.data.validates_on_training:
            for loader in self.data.evaluation_loaders("val"):
                set_epoch(loader, self.trainer.state.epoch)  # per-sample seeds are those of training
        self.metrics.clear_evaluation()
        self.resume_point.begin_validation()
        self.trainer.state.stage = RunningStage.VALIDATING
        self.strategy.share_buffers(self.module)
        try:
            loop.run(feeds)
        finally:
            self.trainer.state.stage = RunningStage.TRAINING
        self.resume_point.end_validation(cut_short=loop.cut_short)
        self.trainer.state.validations += not loop.cut_short
        return loop.cut_short

    # -- evaluation as an entry point --------------------------------------------------------------------------------------------

    def evaluate(self, *, verbose: bool = False, keep: bool = False, chosen: bool = False) -> Any:
        """Runs ``validate``, ``test`` or ``predict`` and returns its result; ``chosen``: the user did not name the checkpoint."""
        kind = KINDS[self.fn]
        loop, feeds = self.evaluation_loop(kind)
        if not feeds:
            cure = self.data.what_to_write(LOADERS[kind], "dataloaders")
            raise ConfigError(f"there is nothing to {self.fn.value}: {cure}")
        self.run_summary.weights(chosen=chosen)
        outputs = loop.run(feeds, keep=keep)
        if self.trainer.state.interrupted:
            return None if self.fn is TrainerFn.PREDICTING else []
        if self.fn is TrainerFn.PREDICTING:
            return gather_predictions(self.strategy.all_gather_object(outputs), self.strategy) if keep else None
        results = self.metrics.evaluation_results(len(feeds))
        if verbose and self.trainer.is_global_zero:
            print_results(kind, results)
        return results

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, filepath: str, *, weights_only: bool, write: Callable[[str, dict[str, Any]], None] | None
    ) -> None:
        """Writes a checkpoint, or lets ``write`` do it: a file on rank 0, a folder on every rank.

        Every rank has to call it; an error is raised on all of them.
        """
        check_saving(self)
        check_peers()  # raises if anything was computed without one of the ranks
        checkpoint = self.record.save(*(WEIGHTS_ONLY if weights_only else ()))
        call_all(self.hooks.callbacks("on_save_checkpoint"), checkpoint)
        self.module.on_save_checkpoint(checkpoint)

        if write is None:
            self.strategy.on_rank_zero(lambda: self.delivery.barrier(self.trainer.state.global_step))
            write_together(filepath, checkpoint, self.strategy)
        elif self.strategy.checkpoint_form == "folder":
            write(filepath, checkpoint)
        else:
            self.strategy.on_rank_zero(lambda: write(filepath, checkpoint))

    def end(self, *, failed: bool) -> None:
        """Ends what runs beside the loops, and calls ``teardown`` unless the run ``failed``."""
        self.closed = True
        self.watchdog.close()
        self.graphs.close(failed=failed)
        self.data.close()
        self.predicted = None  # may be as large as the memory
        if not failed:
            self._call_setup("teardown")

    def give_back(self, *, failed: bool) -> None:
        """Releases the parts and restores the module; after a failure, leaves out the steps that may fail themselves."""
        self.attachment.manual_backward = self.attachment.manual_clip = self.attachment.metrics = None
        self.resume_point.end()
        self.conversion.undo()
        give_back(self._channels_last)
        if not failed:
            # An interrupted process has little time left, and a checkpoint: it does not gather full weights.
            self.strategy.unshard_module(self.module, whole=not self.trainer.state.interrupted)
        revert_syncbn_model(self.module, self._synchronised)
        if not failed:
            self.metrics.close()
        if not failed or self.strategy.world_size == 1:
            self.strategy.teardown()
        else:
            # The other ranks may be anywhere, and leaving the group would wait for them.
            leave_at_exit(self.strategy)
        self.delivery.close(failed=failed)
