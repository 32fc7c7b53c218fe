"""What a Trainer's entry points share: this process's rank, the callbacks, and the session of a run.

:class:`Runner` reads in the order of an entry point: it checks the call, collects the callbacks, opens the session, and chooses the
checkpoint to load.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch

from fabricamp import launch
from fabricamp.arguments.not_offered import lightnings
from fabricamp.callbacks.async_checkpoint import write_in_background
from fabricamp.callbacks.base import decides_by_metrics
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.checkpoint_io import is_asynchronous, writes_own_files
from fabricamp.data import DataModule
from fabricamp.engine.checks.model_checks import check_steps
from fabricamp.engine.ending import releasing
from fabricamp.engine.kernel_choice import kernel_choice
from fabricamp.engine.logger_setup import join_loggers
from fabricamp.engine.report.profiling import reported
from fabricamp.engine.saved.ckpt_path import resolve_checkpoint
from fabricamp.engine.saved.replica_recovery import join_groups
from fabricamp.engine.session import Session
from fabricamp.engine.source import GivenData
from fabricamp.errors import ConfigError, ModuleTypeError
from fabricamp.lightning.bases import DATA, MODULE, derives_from
from fabricamp.lightning.given import adopted, lines_of, own_loader
from fabricamp.lightning.lending import callbacks_of
from fabricamp.loggers.dummy import DummyLogger
from fabricamp.module import TrainingModule
from fabricamp.profilers.base import PassThroughProfiler
from fabricamp.rng import deterministic_mode
from fabricamp.state import TrainerFn
from fabricamp.torch_private import uncompiled
from fabricamp.watchdog import end_by_sigint_at_exit, interrupts, leave_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fabricamp._utils.types import StateDict
    from fabricamp.callbacks.base import Callback
    from fabricamp.strategies.base import Environment
    from fabricamp.trainer import Trainer
    from fabricamp.trainer.arguments import Settings

_LOG = logging.getLogger("fabricamp")
Value = TypeVar("Value")


class Runner:
    """The internals that fit, validate, test and predict of a Trainer share, and that users do not need.

    ``session`` is the running or last session on this process; ``launches``: each call has to start worker processes.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        environment: Environment | None,
        device_indices: list[int],
        given_callbacks: list[Callback],
        default_callbacks: list[Callback],
        around: Environment | None = None,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.environment = environment
        self.root_folder = storage.normalized(settings.default_root_dir)  # now: a script may change its folder later
        self.num_processes = len(device_indices)  # of this node
        self.launches = environment is None and self.num_processes > 1
        self.around = around
        """The processes that run the script, if the Trainer is for another number: rank 0 of them makes its calls for all."""
        self.session: Session | None = None
        self._running: TrainerFn | None = None  # the innermost: hooks may validate, test and search within a fit
        self._earlier_lengths: dict[TrainerFn, dict[str, Any]] = {}
        self._earlier_metrics: dict[str, Any] | None = None
        self.device_indices = device_indices
        self._given_callbacks = given_callbacks
        self._default_callbacks = default_callbacks
        self._callbacks_of: TrainingModule | None = None
        self._own_callbacks: list[Callback] = []  # the callbacks of _callbacks_of
        self._put: list[Callback] = []  # trainer.callbacks after the last call of take_callbacks
        self.take_callbacks(None)

    def become_worker(self) -> None:
        """Takes the rank from the launcher's environment variables, in a worker forked or spawned with the Trainer."""
        self.environment = launch.detect() or self.trainer.strategy.environment
        self.launches = False
        self.around = None

    def for_all(self, action: Callable[[], Value]) -> Value:
        """Returns what ``action`` returns; if rank 0 of the script's processes makes the Trainer's calls, what it returns there."""
        if self.around is None or launch.is_on_first():
            return action()
        return launch.call_on_first(action, self.around)

    def __getstate__(self) -> StateDict:
        """Returns all state except the last session and what runs, whose threads and loops stay in their process."""
        earlier = {"_earlier_lengths": self._lengths(), "_earlier_metrics": self._published()}
        return {**self.__dict__, "session": None, "_running": None, **earlier}

    @contextlib.contextmanager
    def runs(self, fn: TrainerFn) -> Iterator[None]:
        """A context around all code of the user's that an entry point calls: :meth:`refuse_fit_within_a_run` then raises."""
        outer = self._running
        self._running = fn
        try:
            yield
        finally:
            self._running = outer

    def refuse_fit_within_a_run(self) -> None:
        """Raises :class:`ConfigError` if a hook, step or callback of a run of this Trainer calls ``fit``."""
        if self._running is not None:
            running = self._running.value
            raise ConfigError(
                f"fit was called within {running} of the same Trainer (by a hook, a step or a callback), and would go on with its "
                f"counters; call it when {running} has returned, or make another Trainer for it"
            )

    def check_call(
        self,
        fn: TrainerFn,
        module: TrainingModule | None,
        train: object,
        evaluation: object,
        datamodule: DataModule | None,
    ) -> tuple[TrainingModule, GivenData]:
        """Returns the module and the data given to an entry point; raises :class:`ConfigError` if they cannot work."""
        if module is None and self.session is not None:
            # A call without a module uses the last run's module, and its data unless other data is given.
            module = self.session.module
            if datamodule is None and evaluation is None:
                datamodule = self.session.source.datamodule
        name = fn.value
        if _is_datamodule(train):
            datamodule = train
            train = None
        if _is_datamodule(evaluation):
            datamodule = evaluation
            evaluation = None
        module, compiler = uncompiled(module)
        train = own_loader(train)
        evaluation = own_loader(evaluation)
        for given in (module, train, evaluation, datamodule):
            if derives_from(given, MODULE) or derives_from(given, DATA):
                continue
            advice = lightnings(given)
            if advice:
                raise ConfigError(f"{name}: {advice}")
        module = _checked_module(name, module)
        if datamodule is not None and not _is_datamodule(datamodule):
            loaders = "train_dataloaders" if fn is TrainerFn.FITTING else "dataloaders"
            raise ConfigError(
                f"{name} got {_shown(datamodule)} as datamodule; give an instance of a DataModule, or a loader as {loaders}"
            )
        if datamodule is not None and (train is not None or evaluation is not None):
            raise ConfigError(f"{name} got loaders and a datamodule; give one of them")
        check_steps(fn, module)
        return module, GivenData(train=train, evaluation=evaluation, datamodule=datamodule, fn=fn, compiler=compiler)

    def take_callbacks(self, module: TrainingModule | None) -> None:
        """Sets ``trainer.callbacks``: the given callbacks, the module's, the default ones; monitors last.

        A callback of the module replaces given ones of the same class.  A callback that was added to ``trainer.callbacks``, or
        removed from it, since the last call counts as given, or as not given.
        """
        listed = self.trainer.callbacks
        added = [callback for callback in listed if not _contains(self._put, callback)]
        removed = [callback for callback in self._put if not _contains(listed, callback)]
        self._given_callbacks += [adopted(callback) for callback in added]
        self._given_callbacks = [callback for callback in self._given_callbacks if not _contains(removed, callback)]
        # A user who removes a ModelCheckpoint wants none, not the default one.
        self._default_callbacks = _not_replaced(self._default_callbacks, removed)
        if module is not None and module is not self._callbacks_of:
            # Once per module: its callbacks keep their state from run to run, as given ones do.
            self._own_callbacks = callbacks_of(module, self.trainer)
            self._callbacks_of = module
        io = self.trainer.strategy.checkpoint_io
        if is_asynchronous(io) and writes_own_files(io):
            for callback in (*self._given_callbacks, *self._own_callbacks, *self._default_callbacks):
                write_in_background(callback)
        own_classes = {type(callback) for callback in self._own_callbacks}
        callbacks = [callback for callback in self._given_callbacks if type(callback) not in own_classes]
        callbacks += self._own_callbacks
        callbacks += _not_replaced(self._default_callbacks, callbacks)
        # Monitors after the callbacks whose values they read, and checkpoints after the callbacks whose states they save.
        self._put = sorted(callbacks, key=lambda one: (decides_by_metrics(one), isinstance(one, Checkpoint)))
        self.trainer.callbacks[:] = self._put

    @contextlib.contextmanager
    def session_of(self, fn: TrainerFn, module: TrainingModule, source: GivenData) -> Iterator[Session]:
        """Sets up this process's rank and yields a session; releases the session's parts however the run ends."""
        launch.note_run()
        launch.hold_logging_at_fork()
        end_by_sigint_at_exit()
        try:
            session = self._enter(fn, module, source)
        except BaseException:
            leave_at_exit(self.trainer.strategy)  # nothing else releases what _enter has set up
            raise
        self.take_session(session)
        with (
            reported(self.trainer, fn, module),
            deterministic_mode(self.settings.deterministic, benchmark=self.settings.benchmark),
            torch.autograd.set_detect_anomaly(True) if self.settings.detect_anomaly else contextlib.nullcontext(),
            contextlib.nullcontext() if self.settings.performance is None else self.settings.performance.mode(),
            kernel_choice(session.settings, session.strategy),
            # Before loader workers start: they then leave Ctrl-C to this process.
            interrupts(session.agreement),
            releasing(self.trainer, session),
        ):
            yield session
        if session.agreement.asked and not self.trainer.state.interrupted:  # too late to stop at a batch
            self.trainer.state.interrupt(session.agreement.asked)

    def take_rank(self) -> None:
        """Sets this process's rank and device, and joins the other processes of the run."""
        trainer = self.trainer
        environment = self.environment or trainer.strategy.environment
        if trainer.device_type == "cpu":
            device = torch.device("cpu")
        else:
            index = self.device_indices[environment.local_rank % len(self.device_indices)]
            device = torch.device(trainer.device_type, index)
        trainer.strategy.setup_environment(environment, device)

    def _enter(self, fn: TrainerFn, module: TrainingModule, source: GivenData) -> Session:
        """Sets up the rank, the loggers and the callbacks; returns the session of a run, whose watchdog has started."""
        trainer = self.trainer
        self.take_rank()
        join_loggers(trainer)
        self.take_callbacks(module)
        for message in lines_of((*trainer.callbacks, *trainer.loggers)):
            if trainer.is_global_zero:
                _LOG.info(message)
        if fn is TrainerFn.FITTING:
            trainer.state = trainer.state.of_next_fit()
        trainer.state.begin(fn)
        trainer.state.started = time.monotonic()
        trainer.state.forget_stop()
        session = Session(self, fn, module, source)
        if fn is not TrainerFn.FITTING and self.session is not None and self.session.module is module:
            # trainer.optimizers stays available after its fit.
            session.optimizers = self.session.optimizers
            session.schedulers = self.session.schedulers
        published = self._published()
        if published is not None:
            # Visible in setup, as in Lightning: the setup of a test may read what the fit has reached.
            session.metrics.show_earlier(published)
        session.watchdog.start()
        return session

    def resolve(
        self, ckpt_path: str | Path | None, *, weights_only: bool | None = None
    ) -> tuple[str | None, StateDict | None]:
        """Returns the file to load, and its content if that was read in choosing the file; sets ``trainer.ckpt_path``."""
        given = None if ckpt_path is None else str(ckpt_path)
        path, checkpoint = resolve_checkpoint(self.trainer, given, weights_only=weights_only)
        if self.session is not None:
            self.session.run_summary.is_best = given == "best"
        if self.session is not None and self.session.fn is TrainerFn.FITTING:
            path, checkpoint = join_groups(
                self.session, self.session.save_checkpoint, path, checkpoint, weights_only=weights_only
            )
        self.trainer.ckpt_path = path
        return path, checkpoint

    def take_session(self, session: Session) -> None:
        """Replaces the last run's session by ``session``; the last run's numbers of batches stay known."""
        self._earlier_lengths = self._lengths()
        self.session = session

    def lengths(self, fn: TrainerFn) -> dict[str, Any]:
        """Returns the numbers of batches in the running or last run of an entry point; empty if there was none."""
        return self._lengths().get(fn, {})

    def _lengths(self) -> dict[TrainerFn, dict[str, Any]]:
        if self.session is None:
            return self._earlier_lengths
        return {**self._earlier_lengths, self.session.fn: self.session.data.lengths()}

    def _published(self) -> dict[str, Any] | None:
        """Returns the values that the last run logged; None if there was no run."""
        return self._earlier_metrics if self.session is None else self.session.metrics.published()

    @contextlib.contextmanager
    def isolated(self, module: TrainingModule, callbacks: Iterable[Callback]) -> Iterator[None]:
        """A context for runs of ``module`` with only these callbacks; restores settings, counters and so on afterwards."""
        trainer = self.trainer
        own_before = dict(vars(self))
        names = ("state", "precision_plugin", "ckpt_path", "log_dir", "log_folder", "loggers", "profiler")
        before = {name: vars(trainer)[name] for name in names}  # a read of log_dir would make a folder
        callbacks_before = list(trainer.callbacks)
        self.settings = dataclasses.replace(self.settings)
        # New lists: the present ones are restored as they are.
        self._given_callbacks = []
        self._default_callbacks = []
        self._own_callbacks = []
        self._put = []
        self._callbacks_of = module
        trainer.callbacks[:] = callbacks
        trainer.precision_plugin = copy.deepcopy(trainer.precision_plugin)
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.profiler = PassThroughProfiler()
        try:
            yield
        finally:
            vars(self).update(own_before)
            trainer.callbacks[:] = callbacks_before
            for name, value in before.items():
                setattr(trainer, name, value)
            if self.session is not None:
                trainer.strategy.attach(self.session)


def _checked_module(name: str, module: TrainingModule | None) -> TrainingModule:
    if module is None or not (derives_from(module, MODULE) or isinstance(module, TrainingModule)):
        raise ModuleTypeError(
            f"{name} got {_shown(module)}; give a module whose class derives from fabricamp.TrainingModule"
        )
    if "_parameters" not in vars(module):
        raise ConfigError(f"{type(module).__name__}.__init__ does not call super().__init__(); call it first in there")
    return module


def _shown(value: object) -> str:
    """Returns the name of the value's class; for a class, its own name."""
    return f"the class {value.__name__}, not an instance" if isinstance(value, type) else type(value).__name__


def _is_datamodule(value: object) -> TypeGuard[DataModule]:
    return isinstance(value, DataModule) or derives_from(value, DATA)


def _not_replaced(defaults: list[Callback], others: list[Callback]) -> list[Callback]:
    """Returns the default callbacks that none of ``others`` replaces."""
    return [default for default in defaults if not any(isinstance(other, _kind(default)) for other in others)]


def _kind(default: Callback) -> type[Callback]:
    """Returns the class whose instances replace ``default``: a user's own Checkpoint callback replaces the default one."""
    return Checkpoint if isinstance(default, Checkpoint) else type(default)


def _contains(callbacks: list[Callback], callback: Callback) -> bool:
    """Returns whether the object itself is in the list: callbacks may compare equal."""
    return any(other is callback for other in callbacks)
