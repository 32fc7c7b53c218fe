"""Logs, in a program written for Lightning, what gives other weights, learning rates or logged values than Lightning.

The lines correspond to such rows of the table "What stays different on purpose" (docs/from-lightning.md).  A line appears only in a
run to which it applies; code with facts that the session does not know calls ``say_difference`` itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from fabricamp.callbacks.base import matched_states
from fabricamp.callbacks.finetuning import BaseFinetuning
from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.callbacks.stochastic_weight_avg import StochasticWeightAveraging
from fabricamp.callbacks.weight_averaging import WeightAveraging
from fabricamp.data import leaves_of
from fabricamp.data.position import generators_of, own_sampler
from fabricamp.habits import say_difference
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.rng import seeds_workers
from fabricamp.state import TrainerFn
from fabricamp.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from fabricamp._utils.types import Loader, StateDict
    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.run_parts import RunParts
    from fabricamp.engine.session import Session
    from fabricamp.precision.base import Precision


def say_differences(session: Session) -> None:
    """Logs the lines that apply to this run, each once; called when loaders, optimizers and the resume point are known."""
    callbacks = session.trainer.callbacks
    lines = [*_of_processes(session.fn, session.strategy.world_size)]
    if session.fn is not TrainerFn.FITTING and session.checkpoint is not None:
        lines += _of_loaded_evaluation(callbacks, session.checkpoint)
    if session.fn is TrainerFn.FITTING:
        lines += [*_of_optimization(session, session.trainer.precision, resumed=session.resumed)]
        lines += [*_of_data(session.data.train_loader)]
        for callback in callbacks:
            lines += _of_callback(callback, session, resumed=session.resumed)
    for line in lines:
        say_difference(line)


def _of_processes(fn: TrainerFn, world_size: int) -> Iterator[str]:
    if world_size == 1:
        return
    yield (
        "several processes: an epoch's values, checkpoints by steps and plateau schedules use the values of all ranks, also "
        "without sync_dist, and an evaluation uses each sample once; Lightning uses a rank's own values, and some samples twice"
    )
    if fn is TrainerFn.PREDICTING:
        yield "predict returns the predictions of all ranks, in the order of the samples; Lightning returns a rank's own"


def _of_loaded_evaluation(callbacks: Sequence[Callback], checkpoint: StateDict) -> Iterator[str]:
    states = matched_states(callbacks, checkpoint.get("callbacks", {}))
    saves = [(one, state) for one, state in states if isinstance(one, ModelCheckpoint)]
    if any(state.get("best_model_path") != one.best_model_path for one, state in saves):
        yield "ModelCheckpoint keeps the paths and scores of this training; Lightning takes those in the checkpoint that is loaded"


def _of_optimization(parts: RunParts, precision: str, *, resumed: bool) -> Iterator[str]:
    module = parts.module
    if not module.automatic_optimization and len(parts.optimizers) > 1:
        yield _of_counts(len(parts.optimizers), parts.settings.max_steps)
    if module.automatic_optimization and overrides(module, "optimizer_step", TrainingModule):
        yield (
            f"{type(module).__name__}.optimizer_step is called after training_step and backward; in Lightning its closure runs "
            "them, so values logged in training_step are those before it"
        )
    if parts.settings.overfit_batches:
        yield "overfit_batches validates on the batches that it trains on; Lightning takes those of the validation loader"
    if resumed:
        yield (
            "the resumed run goes on as if it had not been cut: at its next batch, with its shuffling and random numbers; "
            "Lightning begins the epoch's data and the random numbers anew"
        )
    if precision in ("bf16-true", "16-true"):
        yield f"{precision}: after the run the module is fp32 again; in Lightning it stays half"


def _of_counts(optimizers: int, max_steps: int) -> str:
    """Returns how steps by hand are counted, and which ``max_steps`` (-1: no limit) trains as long as Lightning does."""
    line = (
        f"global_step, max_steps, every_n_train_steps and the axis of logs count each training_step once, with {optimizers} "
        "optimizers too; Lightning counts each optimizer's step"
    )
    if max_steps <= 0:
        return line
    return (
        f"{line}. max_steps={max_steps} makes so many training_steps here: where each steps all optimizers, write "
        f"max_steps={math.ceil(max_steps / optimizers)} to train as long as Lightning"
    )


def _of_data(train_loader: Loader) -> Iterator[str]:
    loaders = [one for one in leaves_of(train_loader) if isinstance(one, DataLoader)]
    apart = [one for one in loaders if not one.num_workers and generators_of([one])]
    if any((sampler := own_sampler(one)) is not None and sampler.order.reads_to_end for one in apart):
        yield (
            "a loader's or sampler's generator draws once more at the end of each epoch, as in a plain loop over the loader and as "
            "where this run began; in Lightning it does not"
        )
    if seeds_workers() and any(one.num_workers for one in loaders):
        yield "workers have other random numbers in each epoch and loader; in Lightning torch's are the same in each"


def _of_callback(callback: Callback, parts: RunParts, *, resumed: bool) -> Iterator[str]:
    name = type(callback).__name__
    if isinstance(callback, LearningRateMonitor) and parts.settings.accumulates:
        yield f"{name} logs one row for each step; Lightning logs one for each batch that is accumulated"
    if isinstance(callback, BaseFinetuning) and resumed:
        yield f"{name}: the resumed run trains the parameters that were unfrozen; Lightning freezes them again"
    if isinstance(callback, WeightAveraging):
        yield from _of_weight_averaging(callback, parts.module, parts.precision)
    if isinstance(callback, StochasticWeightAveraging) and _has_batch_norm(parts.module):
        yield f"{name} computes BatchNorm's statistics without an epoch of its own; Lightning's epoch for it also logs"
    if isinstance(callback, ModelCheckpoint):
        yield from _of_checkpoint(callback)


def _of_weight_averaging(callback: WeightAveraging, module: TrainingModule, precision: Precision) -> Iterator[str]:
    name = type(callback).__name__
    if not callback.should_update(step_idx=0):
        yield f"{name}: before the first average, the present weights are validated and saved; Lightning takes the initial ones"
    averaged = callback.averaged_buffers(module)
    if callback.averages_buffers and any(buffer not in averaged for buffer, _ in module.named_buffers()):
        yield (
            f"{name}: buffers other than running statistics are the module's; Lightning averages them, and truncates integers "
            "(use_buffers=True: floating-point buffers are averaged)"
        )
    if precision.verdicts is not None:
        yield f"{name}: a step that is skipped for overflow is not averaged; in Lightning it is"


def _of_checkpoint(callback: ModelCheckpoint) -> Iterator[str]:
    if callback.save_last:
        yield "last.ckpt is always the newest checkpoint; Lightning's may be as old as the best, as it is written with another file"
    if callback.monitor is not None and callback.every_n_train_steps:
        yield (
            "a ModelCheckpoint by steps saves after the validation that follows a step, with its score; within an epoch, Lightning "
            "saves before it, with the score of the previous one"
        )


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, AnyBatchNorm) for part in module.modules())
