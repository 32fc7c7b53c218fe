"""One fit, validate, test or predict of one module: sets up the parts in Lightning's order, and releases them.

:class:`Session` reads in the order of a run: :meth:`~Session.attach` and :meth:`~Session.open`; :meth:`~Session.fit_loop` with the
choice of the update, the validation within fit, or :meth:`~Session.evaluate`; :meth:`~Session.save_checkpoint`; then
:meth:`~Session.end` and :meth:`~Session.give_back`.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabricamp._utils.without_compiler import let_optimizers_work
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.callbacks.early_stopping import EarlyStopping
from fabricamp.checkpoint import read_together, write_together
from fabricamp.checkpoint.checkpoint_io import end_plugin, writes_own_files
from fabricamp.checkpoint.compiled_names import with_names_of
from fabricamp.checkpoint.form import form_of
from fabricamp.checkpoint.left_out import LEFT_OUT, Trained
from fabricamp.checkpoint.packing import described_objects, loads_unasked, pack_objects
from fabricamp.checkpoint.plain import stages_as_text
from fabricamp.data import draw_a_pass, release_workers, set_epoch, set_sampler_epoch
from fabricamp.data.lengths import without
from fabricamp.engine.activations import BlockActivations
from fabricamp.engine.checks.model_checks import refuse_layers_without_weights, warn_of_oversights
from fabricamp.engine.checks.monitors import MonitorLook
from fabricamp.engine.checks.optimizer_states import StateLook, check_states, keeps_others
from fabricamp.engine.checks.sharding_checks import check_saving, shard_module
from fabricamp.engine.compiled import Compilation
from fabricamp.engine.evaluation import EvaluationLoop, gather_predictions
from fabricamp.engine.graph.graphs import Graphs
from fabricamp.engine.graph.refusals import graph_refusal, group_refusal, refused
from fabricamp.engine.graph.update import ONE_BACKWARD
from fabricamp.engine.halving import HalvingUpdate
from fabricamp.engine.logger_setup import join_loggers, kept_of, log_hyperparams
from fabricamp.engine.loop import FitParts, TrainingLoop
from fabricamp.engine.manual_update import ClosureUpdate, ManualUpdate
from fabricamp.engine.optimizer_setup import (
    ManagedOptimizer,
    SchedulerConfig,
    check_optimization,
    check_optimizers,
    name_parameters,
    parse_optimizers,
    sharing_weights,
)
from fabricamp.engine.performance import give_back
from fabricamp.engine.report.prediction_record import PredictionRecord, open_record
from fabricamp.engine.report.profiling import profile_evaluation, profile_fit, profile_train_feed
from fabricamp.engine.report.run_file import EarlyRecord
from fabricamp.engine.report.run_summary import RunSummary
from fabricamp.engine.report.time_spent import TimeSpent
from fabricamp.engine.run_context import DETACHED
from fabricamp.engine.run_parts import RunParts
from fabricamp.engine.saved.checkpoint_sections import CALLBACKS, POSITION, TRAINING, WEIGHTS_ONLY, record_of
from fabricamp.engine.saved.resume import ResumePoint
from fabricamp.engine.saved.world_change import keep_samples_of_a_step
from fabricamp.engine.schedules import check_schedule_lengths, schedule_lengths
from fabricamp.engine.source import DataSource, GivenData
from fabricamp.engine.update import StepRunner, Update
from fabricamp.errors import ConfigError
from fabricamp.habits import habits, say_difference
from fabricamp.hooks import Hooks, call_all, call_hook, call_with_stage, overrides
from fabricamp.lightning.lending import attach
from fabricamp.loggers.logger_collection import LoggerCollection, log_values
from fabricamp.metrics import Metrics
from fabricamp.module import TrainingModule
from fabricamp.nn.conversion import convert_syncbn_model, revert_syncbn_model
from fabricamp.ops.peer_memory import check_peers
from fabricamp.optimizers import muon
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.refusals import refuse_masters, refuse_momentum_in_gradients, refuse_strided_states
from fabricamp.precision.base import NOT_CONVERTED
from fabricamp.rng import isolate_rng
from fabricamp.state import RunningStage, TrainerFn
from fabricamp.strategies.meta_init import fill_module
from fabricamp.watchdog import Watchdog, leave_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fabricamp._utils.types import StateDict, Step
    from fabricamp.checkpoint.record import Record
    from fabricamp.data import Feed
    from fabricamp.engine.runner import Runner


_LOG = logging.getLogger("fabricamp")

KINDS = {TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
"""The kind of evaluation of each entry point, as in ``on_validation_start`` and ``test_step``."""

LOADERS = {"validation": "val", "test": "test", "predict": "predict"}
"""The name of each kind's loaders, as in ``val_dataloader`` and ``limit_val_batches``."""


class Session(RunParts):
    """The parts of one entry point's run on this process."""

    def __init__(self, runner: Runner, fn: TrainerFn, module: TrainingModule, source: GivenData) -> None:
        trainer = runner.trainer
        state = trainer.state
        strategy = trainer.strategy
        metrics = Metrics(state, strategy)
        self.trainer = trainer
        self.fn = fn
        self.source = source
        self.conversion = NOT_CONVERTED
        self.delivery = LoggerCollection(trainer.loggers if trainer.is_global_zero else ())
        self.watchdog = Watchdog(state, strategy)
        super().__init__(
            module=module,
            state=state,
            strategy=strategy,
            precision=trainer.precision_plugin,
            metrics=metrics,
            hooks=Hooks(trainer, module, trainer.callbacks),
            settings=runner.settings,
            agreement=self.watchdog.agreement,
            resume_point=ResumePoint(module, state, metrics, strategy, self.delivery, trainer.callbacks),
            time_spent=TimeSpent(),
        )
        self.checkpoint: StateDict | None = None
        self.trained = Trained()
        self.resumed = False
        self.closed = False
        self._told_of_objects = False
        self._told_of_empty: set[int] = set()
        self.run_context = DETACHED  # until attach
        self.step: Step = module.training_step  # in fit: as wrapped by the strategy
        self.validation_follows: Callable[[], bool] = bool  # in fit: TrainingLoop.validation_follows
        self._sanity_names: set[str] | None = None  # what the sanity check has logged
        self._validation: tuple[EvaluationLoop, list[Feed]] | None = None  # of the validation within fit
        self._synchronised_norms: list[nn.Module] = []
        self._channels_last: list[nn.Parameter] = []
        self.graphs = Graphs(self)
        self.compilation = Compilation(self)
        self.activations = BlockActivations(self)
        self.predicted: PredictionRecord | None = None
        self.data = DataSource(source, module, strategy, self.precision, self.settings, state)
        self.run_summary = RunSummary(self)
        self.early_record: EarlyRecord | None = None  # in fit, from open on
        self.is_over = False
        """Whether this fit has nothing left to train: an earlier one, perhaps that of the checkpoint, has ended for good."""

    @cached_property
    def record(self) -> Record:
        """The sections of this run that a checkpoint holds; made once, as they read the run's state when they save and restore."""
        return record_of(self)

    # -- opening, in order -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attaches module and data to this run; from here on signals may end it."""
        self.agreement.guard()
        metrics = None if self.settings.barebones else self.metrics
        fits = self.fn is TrainerFn.FITTING
        self.run_context = attach(self.module, self.source, self.trainer, metrics, fits=fits)
        self.strategy.attach(self)
        self.metrics.sinks.append(partial(log_values, self.state, self.delivery))

    def open(self, ckpt_path: str | None, checkpoint: StateDict | None, *, weights_only: bool | None = None) -> None:
        """Sets up everything before ``on_fit_start``; ``checkpoint`` is the content of ``ckpt_path`` if it was read already.

        ``weights_only`` False allows code to rebuild the objects in ``ckpt_path``.
        """
        fits = self.fn is TrainerFn.FITTING
        self.checkpoint = checkpoint
        if fits:
            self.early_record = EarlyRecord(self)
            # Gradients of an earlier fit, which may have failed within an accumulation, must not enter this fit's sums.
            by_hand = not self.module.automatic_optimization
            if by_hand and any(parameter.grad is not None for parameter in self.module.parameters()):
                say_difference("gradients from before fit are cleared; in Lightning the first step uses them")
            self.module.zero_grad()
        with self.time_spent.part("prepare_data and setup"):
            self._prepare_data()
            self._call_setup("setup")
        if ckpt_path is not None and self.checkpoint is None:
            with self.time_spent.part("reading the checkpoint"):
                self.checkpoint = read_together(ckpt_path, self.strategy, weights_only=weights_only)
        with self.time_spent.part("model and optimizers"):
            self._build(ckpt_path)
        self.is_over = fits and self._nothing_is_left()
        kept = kept_of(self.module, self.source.datamodule)
        shows = self.settings.enable_autolog_hparams and bool(self.trainer.loggers)
        log_hyperparams(kept, self.delivery, shows=shows and not self.is_over)
        if fits:
            self.delivery.begin(self.module)

    def _build(self, ckpt_path: str | None) -> None:
        """Sets up the model, in fit its optimizers too, and restores them."""
        fits = self.fn is TrainerFn.FITTING
        self._configure_model(filled_later=self.checkpoint is not None and LEFT_OUT not in self.checkpoint)
        self._hide_private_values()
        if ckpt_path is not None:
            self._load(ckpt_path)
        self.metrics.forget_earlier()
        self._place_model(loaded=ckpt_path is not None)
        if fits:
            keep_samples_of_a_step(self)
            refuse_layers_without_weights(self.module)
            self._configure_optimizers()
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

    def _prepare_data(self) -> None:
        if self.trainer.local_rank == 0:
            if self.source.datamodule is not None:
                call_hook(self.source.datamodule, "prepare_data")
            call_hook(self.module, "prepare_data")
        self.strategy.barrier("prepare_data")

    def _call_setup(self, name: str) -> None:
        """Calls ``setup`` or ``teardown`` of the DataModule first, as callbacks may look at its data; of the module last."""
        stage = self.fn  # a str too
        if self.source.datamodule is not None:
            call_with_stage(getattr(self.source.datamodule, name), stage)
        for hook in self.hooks.callbacks(name):
            call_with_stage(hook, stage)
        call_with_stage(getattr(self.module, name), stage)

    def _configure_model(self, *, filled_later: bool) -> None:
        """Lets the module build its layers, and shards them; ``filled_later``: a checkpoint's weights will replace its own."""
        self.precision.forward(partial(call_hook, self.module, "configure_model"))
        if self.settings.sync_batchnorm and self.strategy.world_size > 1:
            # Has to come before sharding.  give_back converts these layers back; the user's own SyncBatchNorm modules stay.
            before = set(self.module.modules())
            convert_syncbn_model(self.module)
            self._synchronised_norms = [layer for layer in self.module.modules() if layer not in before]
        if self.strategy.sharding.shards:
            self.run_summary.say(shard_module(self, self.trainer, filled_later=filled_later))
        elif not filled_later:
            fill_module(self.module, self.strategy)

    def _hide_private_values(self) -> None:
        """Marks the loggers as private if hyper-parameters are; called before the loggers write or reopen a file."""
        private = any(kept.logged and kept.private for _, kept in kept_of(self.module, self.source.datamodule))
        for logger in self.trainer.loggers:
            # A logger that has shown private values shows them in a later run too.
            logger.private = logger.private or private

    def _load(self, path: str) -> None:
        """Loads the checkpoint's weights into the fp32 module, from which master weights are taken."""
        assert self.checkpoint is not None
        checkpoint = with_names_of(self.checkpoint, self.module)
        self.checkpoint = form_of(self.strategy).place_weights(checkpoint, path, self.module)
        call_all(self.hooks.callbacks("on_load_checkpoint"), self.checkpoint)
        call_hook(self.module, "on_load_checkpoint", self.checkpoint)
        # The DataModule's state too: configure_optimizers may ask for loaders, to learn the number of steps.
        self._restore("weights", "datamodule")

    def _restore(self, *sections: str) -> None:
        if self.checkpoint is not None:
            self.record.restore(self.checkpoint, str(self.trainer.ckpt_path), *sections)

    def _place_model(self, *, loaded: bool) -> None:
        """Puts the module on its device, with the same weights on every rank, in the precision's dtypes."""
        self.strategy.place_module(self.module)
        if self.settings.performance is not None:
            self._channels_last = self.settings.performance.convert(self.module)
        # Before master weights are taken, since these have to be the same on every rank too.
        self.strategy.share_module(self.module)
        self.conversion = self.precision.convert_module(self.module) or NOT_CONVERTED
        self.run_context.show_dtypes()
        if loaded and self.module.dtype is torch.float64:
            self._restore("weights")  # again: the first time they were rounded to fp32

    def _configure_optimizers(self) -> None:
        module = self.module
        own_step = overrides(module, "lr_scheduler_step", TrainingModule)
        manual = not module.automatic_optimization
        if not self.compilation.compiles:
            let_optimizers_work()
        returned = module.configure_optimizers()
        self.optimizers[:], self.schedulers[:] = parse_optimizers(returned, own_step=own_step, manual=manual)
        check_optimizers(self.optimizers, module)
        check_optimization(self.optimizers, module, self.settings, self.strategy.world_size)
        self.optimizers[:] = self.strategy.setup_optimizers(self.optimizers)
        state = self.state
        # The scaler of a second fit counts skipped steps from 0, so the sum of the fits before is kept beside it.
        skipped = self.trainer.skipped_steps
        state.skipped_before = 0
        name_parameters(self.optimizers, module)
        self.precision.setup_optimizers(module, self.optimizers, self.strategy, accumulates=self.settings.accumulates)
        state.skipped_before = skipped - self.trainer.skipped_steps
        for optimizer in self.optimizers:  # with their masters
            muon.check_shapes(optimizer)
            muon.check_momentum(optimizer)
            refuse_momentum_in_gradients(optimizer, automatic=module.automatic_optimization)
            refuse_strided_states(optimizer)
            shards = self.strategy.sharding.owns_master_weights
            refuse_masters(optimizer, module, self.precision.name, self.strategy.name if shards else "")
        self.run_context.optimizers = [ManagedOptimizer(optimizer, module) for optimizer in self.optimizers]
        self.run_context.schedulers = [config.scheduler for config in self.schedulers]

    def replace_schedules(self, scheduler: object) -> None:
        """Replaces all schedulers by one that steps per epoch; for hooks before an epoch."""
        self.schedulers[:] = [SchedulerConfig(scheduler)]
        self.run_context.schedulers = [scheduler]

    def _wrap_step(self) -> None:
        self.graphs.enter_stream()
        self.activations.put_on()
        # This also takes in parameter groups that callbacks added, so that their state is loaded for fp32 masters.
        automatic = self.module.automatic_optimization
        clip = self.settings.clip if automatic else None
        self.optimizer_steps = [self.precision.step_of(each, self.strategy, clip) for each in self.optimizers]
        sums = any(step.sums for step in self.optimizer_steps)
        if sums and (refusal := self.strategy.refuses_sums()):
            raise ConfigError(
                f"precision {self.precision.name!r} sums the gradients of micro-batches in fp32, and ranks exchange these sums: "
                f"{refusal}"
            )
        apart = self.settings.on_out_of_memory == "halve"
        if self.strategy.exchanges_after_backward is not apart:
            self.strategy.exchanges_after_backward = apart
        with sharing_weights(self.precision, self.optimizers):
            self.step = self.strategy.wrap_module(
                self.module,
                self.activations.watching(self.compilation.training_step()),
                automatic=automatic,
                accumulates=self.settings.accumulates or sums,
            )

    # -- fit ---------------------------------------------------------------------------------------------------------------------

    def _nothing_is_left(self) -> bool:
        state = self.state
        settings = self.settings
        if not state.batches_done:
            return False
        if 0 <= settings.max_steps <= state.global_step or 0 <= settings.max_epochs <= state.epoch:
            return True
        stops = [one for one in self.trainer.callbacks if isinstance(one, EarlyStopping)]
        ended = self.checkpoint is not None and any(one.still_ends() for one in stops)
        return ended and state.global_step >= settings.min_steps and state.epoch >= settings.min_epochs

    def fit_loop(self) -> TrainingLoop:
        """Does the work before the first batch (``on_fit_start``, sanity check, loaders, resume point); returns the loop."""
        if self.trainer.is_global_zero:
            warn_of_oversights(self.module, self.optimizers, self.source.datamodule, self.trainer.callbacks)
        self.run_summary.begin()
        call_all(self.hooks("on_fit_start"))
        states = self._state_look()
        if self.settings.num_sanity_val_steps and (self.checkpoint is None or self.state.batches_done == 0):
            with self.time_spent.part("sanity check"):
                self._sanity_check()
        self.settings.begin_epoch(self.state.epoch)  # a resumed run knows its epoch only now
        self.data.renew()
        if self.settings.num_sanity_val_steps and self.trainer.enable_validation and self.data.defines("val"):
            # A new run has asked for these loaders in its sanity check.  A resumed run asks here, so that every run asks for them
            # first, and with the RNG state that the sanity check of the cut run had.
            with isolate_rng():
                self.data.evaluation_loaders("val")
        if self.state.epoch and self.checkpoint is None:
            # In a second fit Lightning begins a pass here and drops it; this consumes random numbers before the orders that follow.
            draw_a_pass(self.data.train_loader)
            self.resume_point.reloaded = self.state.epoch
        parts = self._fit_parts(states)
        update, runner = self._update(parts)
        self.resume_point.begin(parts.feed, update)
        self.resumed = self.checkpoint is not None
        self._restore(*POSITION)
        if self.checkpoint is not None:
            update.take_over_schedules(self.checkpoint.get("amp", {}))
        self.checkpoint = None  # as large as the model
        self._say_differences()
        loop = TrainingLoop(parts, update, runner)
        self.validation_follows = loop.validation_follows
        return profile_fit(self.trainer, self.run_context, loop)

    def _say_differences(self) -> None:
        """Logs what gives other results than Lightning, in a program written for it."""
        if habits().says_differences:
            from fabricamp.lightning.differences import say_differences

            say_differences(self)

    def _fit_parts(self, states: StateLook | None) -> FitParts:
        """Returns the loop's parts; asks for the training loader before the validation loaders."""
        length = self._epoch_length()
        self.run_summary.workers(self.data.train_loader)
        self.run_summary.rows()
        evaluate = bool(self.data.evaluation_loaders("val")) and overrides(
            self.module, "validation_step", TrainingModule
        )
        monitors = None
        if self.trainer.is_global_zero and not self.run_summary.is_trial:
            monitors = MonitorLook(self, self.trainer.callbacks, validates=evaluate, of_validation=self._sanity_names)
        shared = {one.name: getattr(self, one.name) for one in fields(RunParts)}
        return FitParts(
            **shared,
            requests=self.watchdog.requests,
            feed=self._train_feed(),
            loader=self.data.train_loader,
            step=self.step,
            length=length,
            validate=self._validate if evaluate else None,
            together=self.watchdog.together,
            meet_at_end_of_data=self.watchdog.meet_at_end_of_data,
            say=self.run_summary.say if self.run_summary.speaks_of_time else None,
            monitors=monitors,
            states=states,
            renew=self._renew,
        )

    def _state_look(self) -> StateLook | None:
        """Checks that the states which optimizers have already can be saved; returns what looks at those that steps make."""
        saves = any(
            isinstance(one, Checkpoint) and not getattr(one, "save_weights_only", False)
            for one in self.trainer.callbacks
        )
        others = [one for one in self.optimizers if keeps_others(one)]
        plugin = not writes_own_files(self.strategy.checkpoint_io)
        if not others or not saves or plugin or self.settings.checkpoint_objects:
            return None
        check_states(others)
        return StateLook(self.state, others)

    def _epoch_length(self) -> float:
        """Returns the micro-batches of an epoch, inf if unknown; raises if an epoch would never make a step."""
        length = self.data.num_training_batches
        accumulate = self.settings.accumulate_grad_batches
        if self.settings.partial_window == "drop" and 0 < length < accumulate:
            raise ConfigError(
                f"partial_window='drop' with {length} batches an epoch and accumulate_grad_batches={accumulate} would never make a "
                "step; give 'step' or 'carry', or accumulate fewer"
            )
        return length

    def _train_feed(self) -> Feed:
        return profile_train_feed(self.trainer, self.data.feed(self.data.train_loader, self.data.num_training_batches))

    def _renew(self, parts: FitParts) -> None:
        """Called before an epoch: sets its ``accumulate_grad_batches``, and its loaders if the epoch reloads them."""
        self.settings.begin_epoch(self.state.epoch)
        if self.data.renew():
            self._use_new_loaders(parts)
        state = self.state
        if self.data.reloads and state.batch_idx == 0 and self.resume_point.reloaded != state.epoch:
            # Lightning begins a pass over new loaders and drops it, before start hooks and the epoch's order consume random
            # numbers. A resumed epoch that had begun has made this pass already.
            draw_a_pass(parts.loader)
            self.resume_point.reloaded = state.epoch

    def _use_new_loaders(self, parts: FitParts) -> None:
        self._validation = None  # the next validation asks for its loaders again
        if parts.feed is self.data.train_feed:  # given loaders are not reloaded
            return
        parts.loader = self.data.train_loader
        parts.feed = self._train_feed()
        parts.length = self._epoch_length()
        self.resume_point.use(parts.feed)

    def _update(self, parts: FitParts) -> tuple[Update, StepRunner]:
        """Returns the fit's update (eager, for manual optimization, or for closures) and what runs its batches: itself, or graphs.

        Under manual optimization, gives the module the methods that it calls.  Raises :class:`ConfigError` if a CUDA graph is
        required and impossible.
        """
        parts.state.runs_as = ""
        captures = self._captures(parts)
        halves = self.settings.on_out_of_memory == "halve"
        if not self.module.automatic_optimization:
            if halves:
                raise ConfigError(
                    'on_out_of_memory="halve" with automatic_optimization=False: a training_step that steps itself cannot be run '
                    "again in parts; leave one of them out"
                )
            manual = ManualUpdate(parts)
            self.run_context.manual_backward = manual.backward
            self.run_context.manual_clip = manual.clip
            for optimizer in self.run_context.optimizers:
                optimizer.update = manual.step
            return manual, manual
        if captures:
            together = self._launches_together(parts)
            update = Update(parts, one_backward=ONE_BACKWARD)
            return update, self.graphs.runner(parts, update, together=together)
        if parts.optimizers and demands_closure(parts.optimizers[0]) and not halves:
            update = ClosureUpdate(parts)
        else:
            update = HalvingUpdate(parts) if halves else Update(parts)
        return update, update

    def _captures(self, parts: FitParts) -> bool:
        """Returns whether steps are captured as CUDA graphs; logs why not if captures were requested."""
        options = self.settings.cuda_graph
        if options is None:
            return False
        reason = graph_refusal(parts)
        if reason and options.required:
            raise refused(reason)
        if reason:
            self.run_summary.say_of_graph(f"cuda_graph='auto' runs eagerly: {reason}")
            parts.state.runs_as = "eager"
        return not reason

    def _launches_together(self, parts: FitParts) -> bool:
        """Returns whether one launch makes several steps; logs why not if that was requested."""
        options = self.settings.cuda_graph
        if options is None or options.steps == 1:
            return False
        reason = group_refusal(parts, self.trainer.callbacks)
        what = f"CudaGraph(steps={options.steps})"
        if reason and options.required:
            raise ConfigError(f"cuda_graph: {what}: {reason}; or give steps=1, which launches each step by itself")
        if reason:
            self.run_summary.say_of_graph(f"{what} launches each step by itself: {reason}")
        return not reason

    # -- evaluation, within fit and as an entry point ----------------------------------------------------------------------------

    def _sanity_check(self) -> None:
        state = self.state
        if not (self.trainer.enable_validation and self.data.defines("val")):
            return
        state.stage = RunningStage.SANITY_CHECKING
        with isolate_rng():
            call_all(self.hooks("on_sanity_check_start"))
            loop, feeds = self.evaluation_loop("validation")
            for feed in feeds:
                feed.limit = min(feed.limit, self.settings.num_sanity_val_steps)
            self._set_epoch_of("val")
            if feeds:
                self.metrics.clear_evaluation()
                loop.run(feeds)
            for loader in self.data.evaluation_loaders("val"):
                release_workers(loader)  # the first validation starts its own workers, with the RNG draws of that
            call_all(self.hooks("on_sanity_check_end"))
            self._sanity_names = self.metrics.known_names()
            self.metrics.forget()
        state.stage = RunningStage.TRAINING

    def _validate(self) -> bool:
        """Runs validation within fit; returns whether a stop cut it short."""
        if self._validation is None:
            self._validation = self.evaluation_loop("validation")
        loop, feeds = self._validation
        if self.data.validates_on_training:
            for loader in self.data.evaluation_loaders("val"):
                set_epoch(loader, self.state.epoch)  # per-sample seeds are those of training
        else:
            self._set_epoch_of("val")
        self.metrics.clear_evaluation()
        self.resume_point.begin_validation()
        self.state.stage = RunningStage.VALIDATING
        self.strategy.share_buffers(self.module)
        try:
            loop.run(feeds)
        finally:
            self.state.stage = RunningStage.TRAINING
        self.resume_point.end_validation(cut_short=loop.cut_short)
        self.state.validations += not loop.cut_short
        return loop.cut_short

    def _set_epoch_of(self, name: str) -> None:
        """Sets the training epoch in the samplers of an evaluation's loaders: a ``DistributedSampler`` shuffles by it."""
        for loader in self.data.evaluation_loaders(name):
            set_sampler_epoch(loader, self.state.epoch)

    def evaluation_loop(self, kind: str) -> tuple[EvaluationLoop, list[Feed]]:
        """Returns the loop for ``kind`` ("validation", "test" or "predict") and its feeds."""
        name = LOADERS[kind]
        loaders, lengths = self.data.evaluation(name)
        record = open_record(self.trainer, loaders) if kind == "predict" else None
        self.predicted = record
        if record is not None:
            loaders = record.loaders
        # Not within fit, as in Lightning: tensors kept from a validation may be used in training.
        inference_mode = self.settings.inference_mode and self.fn is not TrainerFn.FITTING
        loop = EvaluationLoop(
            kind,
            module=self.module,
            precision=self.precision,
            state=self.state,
            metrics=self.metrics,
            hooks=self.hooks,
            agreement=self.agreement,
            together=self.watchdog.together,
            inference_mode=inference_mode and self.strategy.sharding.allows_inference_mode(),
            record=record,
            compiled=self.compilation.evaluation_step,
            tell_of_empty=partial(self._tell_of_empty, kind, len(loaders)),
            settle=partial(self.strategy.sharding.settle_module, self.module),
        )
        loop.forward = self.graphs.evaluation(kind, loop.forward)
        begun = self.resumed and self.state.validations > 0
        feeds = [
            self.data.feed(loader, length, index, begun=begun)
            for index, (loader, length) in enumerate(zip(loaders, lengths, strict=True))
        ]
        return profile_evaluation(self.trainer, loop, kind, feeds), feeds

    def _tell_of_empty(self, kind: str, num_loaders: int, dataloader_idx: int) -> None:
        """Warns, once per loader, that an evaluation loader gave no batch; before the hooks that may miss its values."""
        if dataloader_idx in self._told_of_empty or not self.trainer.is_global_zero:
            return
        self._told_of_empty.add(dataloader_idx)
        _LOG.warning(
            "%s loader%s gave no batch, so it has no values; check the data set and the batch size (an iterator is used up after "
            "one pass: give a loader that can be iterated again)%s",
            kind,
            f" {dataloader_idx + 1} of {num_loaders}" if num_loaders > 1 else "",
            without("val_dataloaders") if self.fn is TrainerFn.FITTING else "",
        )

    def evaluate(self, *, verbose: bool = False, keep: bool = False, chosen: bool = False) -> Any:
        """Runs ``validate``, ``test`` or ``predict`` and returns its result; ``chosen``: the user did not name the checkpoint."""
        kind = KINDS[self.fn]
        loop, feeds = self.evaluation_loop(kind)
        if not feeds and getattr(self.settings, f"limit_{LOADERS[kind]}_batches") == 0:
            return None if self.fn is TrainerFn.PREDICTING else []
        if not feeds:
            cure = self.data.what_to_write(LOADERS[kind], "dataloaders")
            raise ConfigError(f"there is nothing to {self.fn.value}: {cure}")
        self._say_differences()
        self.run_summary.weights(chosen=chosen)
        self._set_epoch_of(LOADERS[kind])
        outputs = loop.run(feeds, keep=keep)
        check_peers()  # raises if anything was computed without one of the ranks
        if self.state.interrupted:
            return None if self.fn is TrainerFn.PREDICTING else []
        if self.fn is TrainerFn.PREDICTING:
            if not keep:
                self.predicted = None  # a writer's predictions may be as large as the memory
            return gather_predictions(self.strategy.all_gather_object(outputs), self.strategy) if keep else None
        results = self.metrics.evaluation_results(len(feeds))
        if verbose and self.trainer.is_global_zero:
            self.trainer.print_results(results, self.fn.value)
        return results

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        filepath: str,
        *,
        weights_only: bool,
        trainable_only: bool = False,
        write: Callable[[str, StateDict], None] | None,
    ) -> None:
        """Writes a checkpoint, or lets ``write`` do it: a file on rank 0, a folder on every rank.

        ``trainable_only`` leaves out frozen parameters.  Every rank has to call it; an error is raised on all of them.
        """
        check_saving(self.state, self.strategy, closed=self.closed)
        with self.time_spent.part("saves"), self._group_of_ranks():
            self._save_checkpoint(filepath, weights_only=weights_only, trainable_only=trainable_only, write=write)

    @contextlib.contextmanager
    def _group_of_ranks(self) -> Iterator[None]:
        """A context in which ranks can exchange values: their process group ends with a run, and is made again after it."""
        strategy = self.strategy
        if strategy.world_size == 1 or dist.is_initialized():
            yield
            return
        strategy.setup_environment(strategy.environment, strategy.device)
        try:
            yield
        finally:
            strategy.teardown()

    def _save_checkpoint(
        self,
        filepath: str,
        *,
        weights_only: bool,
        trainable_only: bool,
        write: Callable[[str, StateDict], None] | None,
    ) -> None:
        check_peers()  # raises if anything was computed without one of the ranks
        checkpoint = self.record.save(*(WEIGHTS_ONLY if weights_only else ()))
        call_all(self.hooks.callbacks("on_save_checkpoint"), checkpoint)
        call_hook(self.module, "on_save_checkpoint", checkpoint)
        if trainable_only:
            self.trained.leave_out_others(checkpoint, self.module)
        checkpoint = stages_as_text(checkpoint)
        # A plug-in that writes gets the objects themselves, as in Lightning.
        if writes_own_files(self.strategy.checkpoint_io):
            checkpoint = self._with_objects_pickled(checkpoint)

        if write is None:
            self.strategy.on_rank_zero(lambda: self.delivery.barrier(self.state.global_step))
            write_together(filepath, checkpoint, self.strategy)
        else:
            form_of(self.strategy).on_writers(self.strategy, lambda: write(filepath, checkpoint))

    def _with_objects_pickled(self, checkpoint: StateDict) -> StateDict:
        """Returns ``checkpoint`` with its objects pickled on rank 0; the other ranks write sharded tensors alone.

        Without ``checkpoint_objects`` only those that a resume reads unasked: of classes that torch was told to allow.
        """
        packed = checkpoint

        def pack() -> None:
            nonlocal packed
            packed = pack_objects(checkpoint, self.module, allowed_alone=not self.settings.checkpoint_objects)
            if packed is checkpoint or self._told_of_objects or not self.settings.checkpoint_objects:
                return
            if loads_unasked(packed):
                return
            self._told_of_objects = True
            objects = ", ".join(described_objects(packed))
            _LOG.info("Checkpoints hold objects (%.300s): resume with weights_only=False", objects)

        self.strategy.on_rank_zero(pack)
        return packed

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def end(self, *, failed: bool) -> None:
        """Ends what runs beside the loops, and calls ``teardown`` unless the run ``failed``."""
        self.closed = True
        self.watchdog.close()
        if self.fn is TrainerFn.FITTING:  # a hook of a fit may validate, test or predict: the fit goes on
            self.state.agenda.end()
        self.graphs.close(failed=failed)
        self.data.close()
        if failed:
            self.predicted = None
        self.validation_follows = bool
        if not failed:
            self._call_setup("teardown")
        end_plugin(self.strategy, failed=failed)

    def give_back(self, *, failed: bool) -> None:
        """Releases the parts and restores the module; after a failure, leaves out the steps that may fail themselves."""
        self.run_context.manual_backward = None
        self.run_context.manual_clip = None
        self.run_context.metrics = None
        self.resume_point.end()
        self.compilation.close()
        self.activations.take_off()
        self.conversion.undo()
        give_back(self._channels_last)
        if not failed:
            # An interrupted process has little time left, and a checkpoint: it does not gather full weights.
            self.strategy.sharding.unshard_module(self.module, whole=not self.state.interrupted)
        revert_syncbn_model(self.module, self._synchronised_norms)
        if not failed:
            self.metrics.close()
        if not failed or self.strategy.world_size == 1:
            self.strategy.teardown()
            self.watchdog.leave()
        else:
            # The other ranks may be anywhere, and leaving the group would wait for them.
            leave_at_exit(self.strategy)
        self.delivery.close(failed=failed, unused=failed or self.is_over)
