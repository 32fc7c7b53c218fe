"""Reports the phases of a run to a profiler: the calls are wrapped once before the run, and only if there is a profiler."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from fabricamp.profilers.base import PassThroughProfiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp._utils.types import Step
    from fabricamp.data import Feed
    from fabricamp.engine.evaluation import EvaluationLoop
    from fabricamp.engine.loop import TrainingLoop
    from fabricamp.engine.run_context import RunContext
    from fabricamp.module import TrainingModule
    from fabricamp.profilers.profiler import Profiler
    from fabricamp.state import TrainerFn
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer import Trainer


def profiler_of(trainer: Trainer) -> Profiler | None:
    """Returns the Trainer's profiler; None if it has none that records."""
    return None if isinstance(trainer.profiler, PassThroughProfiler) else trainer.profiler


def profiled(profiler: Profiler, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``call``, wrapped as a profiled action called ``name``."""

    def action(*args: Any, **options: Any) -> Any:
        with profiler.profile(name):
            return call(*args, **options)

    return action


@contextlib.contextmanager
def reported(trainer: Trainer, fn: TrainerFn, module: TrainingModule) -> Iterator[None]:
    """A context around a run: opens the profiler, and lets it report at the end."""
    profiler = profiler_of(trainer)
    if profiler is None:
        yield
        return
    rank = trainer.local_rank if trainer.world_size > 1 else None
    profiler.setup(stage=fn.value, local_rank=rank, log_dir=trainer.log_folder)
    try:
        profiler.watch(module)
        yield
    except BaseException as error:
        try:
            profiler.teardown(fn.value)
        except Exception as failure:  # noqa: BLE001 - the error that ended the run is raised instead
            error.add_note(f"ending the profiler failed too: {type(failure).__name__}: {failure}")
        raise
    profiler.describe()


def profile_fit(trainer: Trainer, run_context: RunContext, loop: TrainingLoop) -> TrainingLoop:
    """Returns the loop; with a profiler, methods of the loop and its parts are wrapped as actions, on these objects only."""
    profiler = profiler_of(trainer)
    if profiler is None:
        return loop
    update = loop.update
    strategy = _strategy(loop.parts.strategy)
    module = f"[LightningModule]{type(loop.parts.module).__name__}"
    given: Any = loop  # methods of one object are replaced, which a type checker does not know
    given._run_epoch = profiled(profiler, "run_training_epoch", loop._run_epoch)
    given._validate = profiled(profiler, "[_EvaluationLoop].run", loop._validate)
    changed: Any = update
    step = update.optimizer_step
    if step is not None:
        step.reduce = profiled(profiler, f"{strategy}.reduce_gradients", step.reduce)
    use = update.use

    def use_profiled(step: Step) -> None:
        use(step)
        changed._forward = profiled(profiler, f"{strategy}.training_step", update._forward)

    changed._forward = profiled(profiler, f"{strategy}.training_step", update._forward)
    changed.use = use_profiled
    runner: Any = loop.runner
    runner.run_batch = profiled(profiler, "run_training_batch", runner.run_batch)
    changed.launch_update = profiled(profiler, f"{module}.optimizer_step", update.launch_update)
    bound = update._hooks
    backward = profiled(profiler, f"{strategy}.backward", bound.backward)
    changed._hooks = dataclasses.replace(bound, backward=backward)
    if run_context.manual_backward is not None:
        run_context.manual_backward = profiled(profiler, f"{strategy}.backward", run_context.manual_backward)
        for one in run_context.optimizers:
            one.update = one.update and profiled(profiler, f"{module}.optimizer_step", one.update)
    return loop


def profile_train_feed(trainer: Trainer, feed: Feed) -> Feed:
    """Returns the training feed; with a profiler, reading each batch is an action."""
    profiler = profiler_of(trainer)
    if profiler is not None:
        _profile_feed(profiler, feed, "[_TrainingEpochLoop].train_dataloader_next")
    return feed


def profile_evaluation(trainer: Trainer, loop: EvaluationLoop, kind: str, feeds: list[Feed]) -> EvaluationLoop:
    """Returns the loop; with a profiler, its steps and the reading of each batch are actions."""
    profiler = profiler_of(trainer)
    if profiler is None:
        return loop
    changed: Any = loop
    changed.forward = profiled(profiler, f"{_strategy(trainer.strategy)}.{kind}_step", loop.forward)
    word = "val" if kind == "validation" else kind
    for feed in feeds:
        _profile_feed(profiler, feed, f"[_EvaluationLoop].{word}_next")
    return loop


def _profile_feed(profiler: Profiler, feed: Feed, name: str) -> None:
    feed.watch(lambda: profiler.profile(name))


def _strategy(strategy: Strategy) -> str:
    return f"[Strategy]{type(strategy).__name__}"
