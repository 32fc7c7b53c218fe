"""The Trainer's step in a loop of the user's own: :class:`Loop`.

In the order of a program: the constructor, ``prepare``, ``prepare_data``, ``restore``; ``step``, or ``forward``, ``backward`` and
``update``; ``save`` and ``log``; values of all ranks; the end.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp import launch
from fabricamp.checkpoint import read_together
from fabricamp.checkpoint.compiled_names import with_names_of
from fabricamp.checkpoint.form import form_of
from fabricamp.data import move_to_device
from fabricamp.engine.kernel_choice import kernel_choice
from fabricamp.engine.logger_setup import join_loggers
from fabricamp.engine.run_context import check_shapes
from fabricamp.engine.source import GivenData
from fabricamp.errors import (
    CheckpointError,
    ConfigError,
    FabricampError,
    NotCapturableError,
    UnknownArgumentError,
    nearest,
)
from fabricamp.hooks import overrides
from fabricamp.lightning.lending import detach
from fabricamp.optimizers.closures import demands_closure
from fabricamp.own_loop.batches import LoopBatches
from fabricamp.own_loop.module import LoopModule
from fabricamp.own_loop.saves import BackgroundSaves, is_name, path_of
from fabricamp.own_loop.session import ApartUpdate, LoopSession
from fabricamp.own_loop.step_function import StepFunction
from fabricamp.precision.base import Clip, Precision
from fabricamp.rng import deterministic_mode, restore_rng, seed_everything
from fabricamp.state import TrainerFn
from fabricamp.trainer import Trainer
from fabricamp.trainer.arguments import as_clip
from fabricamp.watchdog import leave_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fabricamp._utils.types import Batch, StateDict, Stateful
    from fabricamp.compilation import Compile
    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.engine.graph.update import GraphUpdate
    from fabricamp.loggers.base import Logger
    from fabricamp.strategies.base import Strategy

_ELSEWHERE = {
    "gradient_clip_val": "give prepare(..., clip=1.0)",
    "gradient_clip_algorithm": "give prepare(..., clip_algorithm=)",
    "max_epochs": "your loop says how often it runs",
    "max_steps": "your loop says when it ends: global_step counts the updates",
    "callbacks": "call in your loop what a callback would do",
    "log_every_n_steps": "your loop says when it calls log",
    "val_check_interval": "validate in your loop",
    "enable_progress_bar": "print in your loop",
    "enable_checkpointing": "call save in your loop",
}
"""Arguments of the Trainer that a loop of one's own has no use for, and what does it instead."""


class Loop:
    """The Trainer's step in a loop of your own: opt levels, ranks, shards, fused updates, CUDA graphs, exact checkpoints.

    Arguments have the Trainer's names and meanings.  Nothing runs unless you call it: no callbacks, no validation, no limits, no
    watch over the other ranks, and Ctrl-C is Python's.

    Args:
        precision: "O0" to "O5", "fp8", Lightning's names, or an object.
        strategy: "single", "ddp", "delayed_ddp", "fsdp", "auto", or an object.
        accelerator: "cpu", "gpu" or "auto".
        devices: the number of processes on this machine.  A script that runs by itself is run again in each of them, from its first
            line, as under ``torchrun``: so construct the Loop first.
        num_nodes: the number of machines, on each of which torchrun or SLURM starts the processes.
        accumulate_grad_batches: the number of calls of :meth:`step` whose gradients make one update.
        compile: True, "step", "modules", "blocks", or a :class:`Compile`.
        cuda_graph: True replays each step as one CUDA graph, "auto" does if possible; or a :class:`CudaGraph`.
        seed: seeds Python, NumPy and torch, as :func:`seed_everything` does; None leaves them.
        logger: a logger or a list of them for :meth:`log`; False: none.
        **options: further arguments of the Trainer: ``nan_policy``, ``deterministic``, ``benchmark``, ``detect_anomaly``,
            ``sync_batchnorm``, ``use_distributed_sampler``, ``per_sample_seed``, ``prefetch_batches``, ``partial_window``,
            ``performance``, ``plugins``, ``checkpoint_objects``, ``activations``, ``default_root_dir``.

    Raises:
        ConfigError: for what cannot work, with what to change; before the first batch.

    Example:
        >>> run = Loop(accelerator="cpu", seed=0)
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> losses = [float(run.step(lambda x: model(x).square().mean(), torch.ones(4, 2))) for _ in range(20)]
        >>> losses[-1] < losses[0], run.global_step
        (True, 20)
        >>> run.close()
    """

    def __init__(
        self,
        *,
        precision: str | int | Precision | None = "O0",
        strategy: str | Strategy | None = "auto",
        accelerator: str | None = "auto",
        devices: int | str | list[int] | None = "auto",
        num_nodes: int | None = 1,
        accumulate_grad_batches: int | None = 1,
        compile: bool | str | dict[str, Any] | Compile | None = False,  # noqa: A002 - torch's name of it
        cuda_graph: bool | str | CudaGraph | None = False,
        seed: int | None = None,
        logger: Logger | list[Logger] | bool | None = False,
        **options: Any,
    ) -> None:
        _check_options(options)
        trainer = Trainer(
            precision=precision,
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            accumulate_grad_batches=accumulate_grad_batches,
            compile=compile,
            cuda_graph=cuda_graph,
            logger=False if logger is None else logger,
            max_epochs=-1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        _check(trainer)
        self._trainer = trainer
        self._strategy = trainer.strategy
        _start_ranks(trainer)
        if seed is not None:
            seed_everything(seed, verbose=False)
        self._session: LoopSession | None = None
        self._saves: BackgroundSaves | None = None
        self._resumed_rng: StateDict | None = None
        self._rng_is_used = False
        self._function: StepFunction | None = None
        self._run_batch: Callable[[Batch, int, bool], Any] | None = None
        """Runs the batches of whole steps, from the first one on."""
        self._apart: ApartUpdate | None = None
        self._divisor = 1
        self._clips: dict[Optimizer, Clip] = {}
        self._begun = False
        self._within_step = False
        self._forwards = 0  # since the last update
        self._numbers = count()  # of the calls of step in this epoch
        self._closed = False
        self.batch_is_open = False
        """Whether a batch of the prepared loader is out and not done."""
        self._contexts = contextlib.ExitStack()
        launch.note_run()
        trainer._runner.take_rank()
        leave_at_exit(self._strategy)
        settings = trainer._runner.settings
        for context in (
            deterministic_mode(settings.deterministic, benchmark=settings.benchmark),
            torch.autograd.set_detect_anomaly(True) if settings.detect_anomaly else contextlib.nullcontext(),
            contextlib.nullcontext() if settings.performance is None else settings.performance.mode(),
            kernel_choice(settings, self._strategy),
        ):
            self._contexts.enter_context(context)
        join_loggers(trainer)
        trainer.state = trainer.state.of_next_fit()
        trainer.state.begin(TrainerFn.FITTING)
        self._state = trainer.state
        atexit.register(_end_at_exit, weakref.ref(self))

    # -- before the first step -----------------------------------------------------------------------------------------------------

    def prepare(self, *parts: Any, clip: float | None = None, clip_algorithm: str | None = "norm") -> Any:
        """Puts modules and their optimizers on the device, in the level's dtypes and the strategy's shards; returns them in order.

        Call it once, with all modules that are trained and all their optimizers.  An optimizer keeps its object and its groups;
        its parameters become fp32 masters, or shards, where level and strategy have such.  ``clip`` is the largest norm (or with
        ``clip_algorithm="value"`` the largest absolute value) of an optimizer's gradients in an update; None does not clip.
        """
        if self._session is not None:
            raise ConfigError("prepare was called before; give it all modules and optimizers in one call")
        modules = [one for one in parts if isinstance(one, nn.Module)]
        optimizers = [one for one in parts if not isinstance(one, nn.Module)]
        _check_parts(modules, optimizers)
        names = ["model"] if len(modules) == 1 else [f"model_{number}" for number in range(len(modules))]
        module = LoopModule(dict(zip(names, modules, strict=True)), optimizers)
        module.check_parameters()
        module.automatic_optimization = len(optimizers) == 1
        trainer = self._trainer
        runner = trainer._runner
        session = LoopSession(runner, TrainerFn.FITTING, module, GivenData())
        runner.take_session(session)
        self._clip_to = as_clip(clip, clip_algorithm)
        session.attach()
        session.open(None, None)
        self._session = session
        self._call = module.call
        self._optimizers = list(session.optimizers)
        if session.settings.cuda_graph is not None:
            self._function = StepFunction(module, self.device)
        return parts if len(parts) > 1 else parts[0]

    def prepare_data(self, loader: object) -> LoopBatches:
        """Returns the loader's batches: each rank's share, on the device ahead of their step, at a position that ``save`` keeps.

        Each ``for`` is an epoch.  Call it after :meth:`prepare`, before :meth:`restore` and the first step, once.
        """
        session = self._opened("prepare_data")
        if self._begun or session.loader is not None:
            raise ConfigError(
                "prepare_data comes once, before restore and the first step: a checkpoint has the position in one loader; for "
                "validation use a loader as it is, with run.to_device(batch)"
            )
        session.use_loader(loader)
        return LoopBatches(self, session)

    def restore(self, path: str | Path, *, weights_only: bool | None = None, **others: Stateful) -> bool:
        """Goes on from a file of :meth:`save`: weights, optimizers, loss scale, counters, position in the data, random numbers.

        A name such as "last" is a file in ``default_root_dir``: if there is none, returns False and nothing changes.  A path has to
        exist.  ``others`` are the objects that ``save`` was given by these names.  ``weights_only`` False allows a file that you
        trust to rebuild its objects by code.  Every rank calls it, after ``prepare`` and ``prepare_data``, before the first step.
        """
        session = self._opened("restore")
        if self._begun:
            raise ConfigError("restore comes before the first step; construct another Loop to begin again")
        file = path_of(path, session.settings.default_root_dir)
        if is_name(path) and not self._strategy.on_rank_zero(Path(file).exists):
            return False
        self._trainer.ckpt_path = file
        checkpoint = read_together(file, self._strategy, weights_only=weights_only)
        own = checkpoint.get("loop")
        if own is None:
            raise CheckpointError(
                f"{file} was not written by a Loop; take its weights by model.load_state_dict before prepare"
            )
        missing = sorted(others.keys() ^ own["others"].keys())
        if missing:
            raise CheckpointError(
                f"{file} has the states of {sorted(own['others'])} beside the run's, and restore was given {sorted(others)}; give "
                "save and restore the same objects by name"
            )
        checkpoint = with_names_of(checkpoint, session.module)
        checkpoint = form_of(self._strategy).place_weights(checkpoint, file, session.module)
        session.record.restore(checkpoint, file, "weights", "counters")
        self._begin(automatic=own["automatic"], checkpoint=checkpoint, path=file)
        for name, one in others.items():
            one.load_state_dict(own["others"][name])
        self._resumed_rng = checkpoint["rng"][self.rank] if self.rank < len(checkpoint.get("rng", ())) else None
        self.restore_rng()
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------------------

    def step(self, fn: Callable[[Batch], Any], batch: Batch, optimizer: Optimizer | None = None) -> Any:
        """Clears gradients, runs ``fn(batch)``, backward of the loss that it returns, and the update; returns the loss, detached.

        ``fn`` returns the loss as a scalar tensor, as ``(sum, weight)``, or a dict with "loss" and other values, which is returned,
        detached.  With ``accumulate_grad_batches=n`` every n-th call updates.  With several optimizers name the one that steps, or
        call ``backward`` and ``update`` in ``fn``, which is then one step of all optimizers together.
        """
        if self._run_batch is None or optimizer is not None:
            return self._other_step(fn, batch, optimizer)
        self._call.function = fn
        try:
            outputs = self._run_batch(batch, next(self._numbers), self._feed.last)
        except FabricampError as error:
            _speak_of_the_function(error)
            raise
        if self.batch_is_open:
            self.end_batch()
        return outputs["loss"] if outputs is not None and len(outputs) == 1 else outputs

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns ``fn(*args)``, computed at the level: in its autocast, with half modules' inputs and outputs cast.

        For the parts apart, and, under ``torch.no_grad()``, for validation: ``run.forward(model, x)``.
        """
        session = self._opened("forward")
        if not torch.is_grad_enabled():
            return session.precision.forward(fn, *args)
        update = self._in_parts("forward")
        self._forwards += 1
        self._call.function = fn if len(args) == 1 else partial(_spread, fn)
        return update._forward(args[0] if len(args) == 1 else args, 0)

    def backward(self, loss: Tensor, *, loss_id: int = 0, **options: Any) -> None:
        """Adds the gradients of ``loss``, multiplied by the loss scale; ``options`` are those of ``Tensor.backward``.

        ``loss_id`` is the number of the scale, with ``OptLevel(num_losses=)``.
        """
        update = self._in_parts("backward")
        if self._casts and not self._forwards and not self._within_step:
            raise ConfigError(
                f"backward got a loss that was not computed at precision {self._trainer.precision_plugin.name!r}; compute it by "
                "loss = run.forward(fn, batch)"
            )
        share = loss if self._divisor == 1 else loss / self._divisor
        if self._within_step:
            update.backward(share, loss_id=loss_id, **options)
        else:
            update.backward_apart(share, loss_id=loss_id, **options)

    def update(self, *optimizers: Optimizer) -> None:
        """Exchanges, unscales and clips the gradients of the optimizers (by default all), steps them and clears their gradients.

        Each call is one step: ``global_step`` counts it, and the loss scale moves once.  Within the ``fn`` of :meth:`step` that
        call is the step.
        """
        update = self._in_parts("update")
        chosen = list(optimizers) or self._optimizers
        for one in chosen:
            if not any(one is known for known in self._optimizers):
                raise ConfigError(f"update got a {type(one).__name__} that prepare was not given")
            clip = self._clips.pop(one, self._clip_to)
            if clip is not None:
                update.clip(one, clip)
        if self._within_step:
            for one in chosen:
                update.step(one, None)
                one.zero_grad()
            return
        update.update_apart(chosen)
        self._forwards = 0
        if self.batch_is_open:
            self.end_batch()

    def clip_next(self, optimizer: Optimizer, value: float, algorithm: str = "norm") -> None:
        """Clips the gradients of ``optimizer`` in its next :meth:`update`, by "norm" or "value", in place of ``clip``."""
        clip = as_clip(value, algorithm)
        if clip is not None:
            self._clips[optimizer] = clip

    @contextlib.contextmanager
    def accumulate(self, batches: int) -> Iterator[None]:
        """A context for the ``batches`` calls of :meth:`backward` before an :meth:`update`: each adds its share of the mean."""
        self._in_parts("accumulate")
        if type(batches) is not int or batches < 1:
            raise ConfigError(f"accumulate({batches!r}) is not allowed; give a number of batches from 1")
        self._divisor = batches
        try:
            yield
        finally:
            self._divisor = 1

    # -- what is kept --------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, asynchronous: bool = False, **others: Stateful) -> str:
        """Writes all that :meth:`restore` restores, atomically, and returns the path; every rank calls it, between two steps.

        A name such as "last" is a file in ``default_root_dir``, which replaces the one before.  ``others`` are further objects with
        ``state_dict`` and ``load_state_dict``, such as ``scheduler=``.  ``asynchronous`` copies the state to host memory and writes
        it in a thread; the next save, ``wait`` and ``close`` wait for it and raise its error.
        """
        session = self._opened("save")
        if not self._begun:
            self._begin(automatic=len(self._optimizers) == 1)
        self._refuse_within_step("save")
        self._update.stepped = False
        file = path_of(path, session.settings.default_root_dir)
        module = cast("LoopModule", session.module)
        states = {name: one.state_dict() for name, one in others.items()}
        module.states = {"automatic": module.automatic_optimization, "others": states}
        self.wait()
        if asynchronous:
            if self._saves is None:
                self._saves = BackgroundSaves(session)
            self._saves.save(file)
        else:
            session.save_checkpoint(file, weights_only=False, write=None)
        module.states = {}
        return file

    def wait(self) -> None:
        """Waits for the file of ``save(asynchronous=True)``; raises :class:`CheckpointError` on all ranks if it was not written."""
        if self._saves is not None:
            self._saves.settle()

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Gives the loggers of rank 0 the values, numbers or tensors with one, at ``step`` (by default ``global_step``).

        Reads tensors, so it waits for the device: call it every so many steps.  Other ranks' calls do nothing.
        """
        session = self._opened("log")
        if self._trainer.loggers and self.is_global_zero:
            numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
            session.delivery.log_metrics(numbers, self.global_step if step is None else step)

    def print(self, *args: Any, **options: Any) -> None:
        """Prints once, not once per process."""
        self._trainer.print(*args, **options)

    @property
    def global_step(self) -> int:
        """The number of updates, applied or skipped for overflow."""
        return self._state.global_step

    @property
    def epoch(self) -> int:
        """The number of complete passes over the prepared loader."""
        return self._state.epoch

    @property
    def skipped_steps(self) -> int:
        """The number of updates that were skipped as gradients were not finite; those of the last two steps are not known yet."""
        return self._trainer.skipped_steps

    # -- ranks ---------------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self._strategy.rank

    @property
    def local_rank(self) -> int:
        """The number of this process among those of this machine."""
        return self._strategy.environment.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._strategy.rank == 0

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._strategy.device

    def to_device(self, batch: Batch) -> Batch:
        """Returns the batch with its tensors on this process's device, in the level's input dtype."""
        moved: Batch = move_to_device(batch, self.device)
        precision = self._trainer.precision_plugin
        return precision.convert_input(moved)

    def all_reduce(self, value: Tensor, op: str = "mean") -> Tensor:
        """Returns ``value`` reduced over the ranks by "mean", "sum", "min" or "max", detached; every rank calls it."""
        return self._strategy.reduce(value, op)

    def all_gather(self, value: Tensor) -> Tensor:
        """Returns every rank's ``value``, stacked along a new first dimension, detached; shapes have to be equal."""
        if self.world_size > 1:
            check_shapes(self._strategy, value)
        return self._strategy.all_gather(value)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Returns rank ``src``'s ``value``, anything that pickles, on every rank."""
        return self._strategy.broadcast(value, src)

    def barrier(self) -> None:
        """Waits for every rank."""
        self._strategy.barrier()

    # -- the end -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for writes, closes the loggers, leaves the other ranks, and gives the modules back whole, in their own dtypes."""
        self._close(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._run_batch = None  # so that a later step asks, and is refused
        session = self._session
        try:
            if session is not None:
                self._close_session(session, failed=failed)
            elif not failed:
                self._strategy.teardown()
        finally:
            self._state.end()
            self._contexts.close()

    def _close_session(self, session: LoopSession, *, failed: bool) -> None:
        if self._saves is not None and not failed:
            self._saves.close()
        elif self._saves is not None:
            self._saves.wait_alone()
        if self._begun and not failed and self._update.overflow_policy is not None:
            self._update.overflow_policy.finish()
        try:
            session.end(failed=failed)
        finally:
            session.give_back(failed=failed)
            detach(session.run_context, session.source)

    # -- within the package --------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Called before a pass over the prepared loader."""
        self._numbers = count()
        if self._begun:
            assert self._session is not None
            self._session.follow_freezing()
            self._session.steps.begin_epoch(0)

    def end_batch(self) -> None:
        """Counts the batch that is out as done."""
        self.batch_is_open = False
        self._state.batch_idx += 1
        self._state.batches_done += 1

    def end_epoch(self) -> None:
        """Counts a complete pass over the prepared loader."""
        if self._begun:
            self._update.end_epoch()
        self._state.epoch += 1
        self._state.batch_idx = 0
        self._numbers = count()

    def restore_rng(self) -> None:
        """Restores the random numbers of a checkpoint: in ``restore``, and once more where its epoch goes on."""
        if self._resumed_rng is not None:
            restore_rng(self._resumed_rng)
            if self._state.batch_idx == 0 or self._session is None or self._session.loader is None or self._rng_is_used:
                self._resumed_rng = None
            self._rng_is_used = True

    def _opened(self, name: str) -> LoopSession:
        if self._closed:
            raise ConfigError(f"{name} after close; construct another Loop")
        if self._session is None:
            raise ConfigError(
                f"{name} comes after prepare: call model, optimizer = run.prepare(model, optimizer) first"
            )
        return self._session

    def _refuse_within_step(self, name: str) -> None:
        if self._within_step:
            raise ConfigError(f"{name} within the function of step; call it between two steps")

    def _begin(self, *, automatic: bool, checkpoint: StateDict | None = None, path: str = "") -> None:
        """Makes the update, at the first step or when a checkpoint is restored."""
        session = self._opened("step")
        if automatic:
            session.settings.clip = self._clip_to
        session.begin(automatic=automatic, checkpoint=checkpoint, path=path)
        self._begun = True
        self._update = session.update
        self._feed = session.update._parts.feed
        self._apart = session.update if isinstance(session.update, ApartUpdate) else None
        if self._apart is None:
            captures = session.graphs.update
            self._run_batch = session.steps.run_batch if captures is None else self._captured(captures)
        self._casts = overrides(session.precision, "forward", Precision)

    def _captured(self, captures: GraphUpdate) -> Callable[[Batch, int, bool], Any]:
        """Returns what runs a batch as a graph, which knows what the step's function reads."""
        function = self._function
        assert function is not None

        def run_batch(batch: Batch, number: int, last: bool) -> Any:
            if not function.seen.is_all_that_is_read_by(self._call.function):
                try:
                    function.look(self._call.function)
                except NotCapturableError as error:
                    captures.fallback.give_up(str(error))
            if captures.fallback.why:
                self._run_batch = captures.run_batch
            return captures.run_batch(batch, number, last)

        return run_batch

    def _in_parts(self, name: str) -> ApartUpdate:
        """Returns the update of a Loop whose steps are made in parts; raises if its steps were made whole so far."""
        session = self._opened(name)
        if not self._begun:
            _refuse_parts(session)
            self._begin(automatic=False)
        if self._apart is None:
            raise ConfigError(
                f"{name}: this Loop makes whole steps, by step(fn, batch), whose wrapper and graph other steps would miss; "
                "make all steps in parts (forward, backward, update), or validate under torch.no_grad()"
            )
        return self._apart

    def _other_step(self, fn: Callable[[Batch], Any], batch: Batch, optimizer: Optimizer | None) -> Any:
        """Makes a step in a Loop that has made none, in parts, or of one of several optimizers."""
        self._opened("step")
        if not self._begun:
            if len(self._optimizers) > 1:
                _refuse_parts(self._opened("step"))
            self._begin(automatic=len(self._optimizers) == 1)
        if optimizer is not None and not any(optimizer is one for one in self._optimizers):
            raise ConfigError(f"step got a {type(optimizer).__name__} that prepare was not given")
        return self.step(fn, batch) if self._apart is None else self._step_in_parts(fn, batch, optimizer)

    def _step_in_parts(self, fn: Callable[[Batch], Any], batch: Batch, optimizer: Optimizer | None) -> Any:
        """Makes a step of ``optimizer``, or of those that ``fn`` itself updates."""
        if self._divisor > 1:
            raise ConfigError(
                "step within accumulate; give Loop(accumulate_grad_batches=n), or call backward and update"
            )
        self._refuse_within_step("step")
        update = self._apart
        assert update is not None
        session = self._opened("step")
        returned: Any = None

        def run(given: Batch) -> Any:
            nonlocal returned
            returned = fn(given)
            loss = returned.get("loss") if isinstance(returned, dict) else returned
            chosen = optimizer
            if chosen is None and len(self._optimizers) == 1 and not update.stepped:
                chosen = self._optimizers[0]
            if chosen is not None:
                if not isinstance(loss, Tensor):
                    raise ConfigError(f"step's function returned a {type(loss).__name__}; return the loss as a tensor")
                chosen.zero_grad()
                self.backward(loss)
                self.update(chosen)
            elif not update.stepped:
                raise ConfigError(
                    f"no optimizer stepped, of the {len(self._optimizers)} that prepare was given; name it: "
                    "step(fn, batch, optimizer), or call backward and update in the function"
                )
            return None

        self._call.function = run
        self._within_step = True
        try:
            session.steps.run_batch(batch, next(self._numbers), self._feed.last)
        finally:
            self._within_step = False
        update.stepped = False
        if self.batch_is_open:
            self.end_batch()
        if isinstance(returned, dict):
            return {name: one.detach() if isinstance(one, Tensor) else one for name, one in returned.items()}
        return returned.detach() if isinstance(returned, Tensor) else returned


_OPTIONS = (
    "nan_policy",
    "deterministic",
    "benchmark",
    "detect_anomaly",
    "sync_batchnorm",
    "use_distributed_sampler",
    "per_sample_seed",
    "prefetch_batches",
    "partial_window",
    "performance",
    "plugins",
    "checkpoint_objects",
    "activations",
    "default_root_dir",
)
"""The Trainer's arguments that ``Loop(**options)`` passes on."""

_NAMED = (
    "precision", "strategy", "accelerator", "devices", "num_nodes", "accumulate_grad_batches", "compile", "cuda_graph", "seed",
    "logger",
)  # fmt: skip


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _OPTIONS:
            continue
        known = (*_NAMED, *_OPTIONS)
        cure = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else nearest(name, known)
        raise UnknownArgumentError(f"Loop has no argument {name!r}{cure or ' (known: ' + ', '.join(known) + ')'}")


def _check(trainer: Trainer) -> None:
    """Raises :class:`ConfigError` for options of the Trainer that need its loop."""
    settings = trainer._runner.settings
    if settings.cuda_graph is not None and settings.cuda_graph.steps > 1:
        raise ConfigError(
            f"CudaGraph(steps={settings.cuda_graph.steps}): a loop of one's own calls each step by itself; give steps=1"
        )
    if trainer.strategy.membership.heals:
        raise ConfigError(
            f"strategy={trainer.strategy.name!r}: replicas join between the steps of the Trainer's loop; give 'ddp', or use the "
            "Trainer"
        )
    if settings.nan_policy == "stop":
        raise ConfigError(
            "nan_policy='stop' ends the Trainer's loop; give 'raise', which raises NonFiniteError in step, or 'skip'"
        )


def _start_ranks(trainer: Trainer) -> None:
    """Starts the processes of a script that has none yet; this process then ends with them, and does not return."""
    runner = trainer._runner
    if runner.around is not None:
        raise ConfigError(
            f"devices asks for {runner.num_processes}, and the script runs in {runner.around.world_size} processes already; give "
            f"devices={runner.around.local_world_size} or 'auto'"
        )
    if not runner.launches:
        return
    count = runner.num_processes
    if launch.script_can_rerun() and launch.choose_start_method("auto") == "script":
        launch.run_script(count)
    script = sys.argv[0] if launch.script_can_rerun() else "train.py"
    raise ConfigError(
        f"devices={count}: a loop of one's own cannot be handed to other processes in its middle, and this process (a notebook, a "
        "test, python -c, or a script in which a run was before) is no script to run again from its first line; write the loop "
        f"into a file and start it by torchrun --nproc_per_node={count} {Path(script).name}, or give devices=1"
    )


def _speak_of_the_function(error: FabricampError) -> None:
    """Lets an error of the Trainer's step speak of what a Loop has in place of ``training_step``."""
    words = str(error).replace("training_step", "step's function").replace(", or set automatic_optimization=False", "")
    error.args = (words, *error.args[1:])


def _spread(fn: Callable[..., Any], arguments: Any) -> Any:
    return fn(*arguments)


def _refuse_parts(session: LoopSession) -> None:
    """Raises :class:`ConfigError` where steps in parts, or of several optimizers, cannot work."""
    if session.strategy.sharding.shards:
        raise ConfigError(
            f"strategy={session.strategy.name!r} gathers the weights for forward and backward of a whole step: make steps by "
            "step(fn, batch), with one optimizer; or give 'ddp'"
        )
    if session.settings.accumulates:
        raise ConfigError(
            "accumulate_grad_batches counts whole steps, by step(fn, batch); in steps of several optimizers, or in parts, write "
            "`with run.accumulate(n)` around the backwards of an update"
        )
    if session.settings.cuda_graph is not None and session.settings.cuda_graph.required:
        raise ConfigError(
            "cuda_graph captures whole steps, by step(fn, batch) with one optimizer; leave it out, or give cuda_graph='auto'"
        )


def _check_parts(modules: list[nn.Module], optimizers: list[Any]) -> None:
    for one in optimizers:
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigError(
                f"prepare got a {type(one).__name__}; call its step() in your loop, and give it to save and restore: "
                "run.save('last', scheduler=scheduler)"
            )
        if not (isinstance(one, Optimizer) or (hasattr(one, "step") and hasattr(one, "param_groups"))):
            cure = "give loaders to prepare_data" if hasattr(one, "__iter__") else "give modules and optimizers"
            raise ConfigError(f"prepare got a {type(one).__name__}; {cure}")
        if demands_closure(one):
            raise ConfigError(
                f"{type(one).__name__} calls the forward itself, by a closure, and a Loop's step is one forward and one backward; "
                "use the Trainer, or another optimizer"
            )
    if not modules or not optimizers:
        raise ConfigError(
            f"prepare got {len(modules)} modules and {len(optimizers)} optimizers; give at least one of each"
        )


def _end_at_exit(reference: weakref.ref[Loop]) -> None:
    """Finishes what a program that has not called ``close`` has begun; without the other ranks, which may be anywhere."""
    loop = reference()
    if loop is None or loop._closed:
        return
    if loop._saves is not None:
        loop._saves.wait_alone()
    if loop._session is not None:
        loop._session.delivery.close(failed=False)
    loop._contexts.close()  # now: the interpreter would end their generators when half of it is gone
