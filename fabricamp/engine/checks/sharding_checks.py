"""Checks a run whose strategy shards the module, before anything is sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.callbacks.amp_state import AmpState
from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
from fabricamp.callbacks.divergence_check import DivergenceCheck
from fabricamp.callbacks.gradient_monitor import GradientMonitor
from fabricamp.callbacks.lr_finder import LearningRateFinder
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.checkpoint import storage
from fabricamp.engine.saved.world_change import KEEP_GLOBAL_BATCH
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.loggers.tensorboard import TensorBoardLogger
from fabricamp.precision.base import Precision
from fabricamp.precision.casting import modules_to_convert
from fabricamp.precision.level import OptLevel
from fabricamp.strategies.base import ShardPlan
from fabricamp.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.run_parts import RunParts
    from fabricamp.loggers.base import Logger
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer import Trainer

_REFUSED = {
    AmpState: "a script's file holds whole weights; use ModelCheckpoint",
    BatchSizeFinder: "find it with strategy='single' on a smaller model",
    LearningRateFinder: "find it with strategy='single' on a smaller model",
    DivergenceCheck: "leave it out: every rank has its own shards, and none that could diverge",
}


def shard_module(parts: RunParts, trainer: Trainer, *, filled_later: bool) -> str:
    """Shards the module, and returns a line that says how; raises :class:`ConfigError` for what cannot be sharded."""
    _check(parts.strategy.name, trainer.callbacks, trainer.loggers)
    return parts.strategy.sharding.shard_module(parts.module, _plan(parts, filled_later=filled_later))


def check_saving(state: RunState, strategy: Strategy, *, closed: bool) -> None:
    """Raises :class:`CheckpointError` if weights and counters are not of the same step, or the shards for a folder are gone.

    ``closed``: the run has ended.
    """
    if state.batches_done < state.agenda.committed:
        raise CheckpointError(
            f"save_checkpoint after step {state.global_step}, within a launch of several steps: the weights are those of the "
            "last; let the callback's holds_at return the step, or give CudaGraph(steps=1)"
        )
    if closed and strategy.sharding.shards:
        raise CheckpointError(
            f"save_checkpoint after a run with strategy={strategy.name!r}: its shards were freed at its end; call it "
            "in a hook such as on_fit_end, or use a ModelCheckpoint. On rank 0 the module has the whole weights: "
            "module.state_dict()"
        )


def _check(name: str, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> None:
    """Raises for callbacks and loggers that need the whole module, under the strategy called ``name``."""
    for callback in callbacks:
        for kind, cure in _REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigError(f"{type(callback).__name__} with strategy={name!r} is not offered: {cure}")
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and storage.is_remote(callback.dirpath):
            raise ConfigError(
                f"ModelCheckpoint(dirpath={callback.dirpath!r}) with strategy={name!r}: all ranks write a folder, which has to be "
                "on a file system that they have mounted; give a path"
            )
        if isinstance(callback, GradientMonitor) and callback.histograms:
            raise ConfigError(
                f"GradientMonitor(histograms=True) with strategy={name!r} is not offered, as each rank has a part of a gradient: "
                "leave histograms out"
            )
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and logger.draws_graph:
            raise ConfigError(
                f"TensorBoardLogger(log_graph=True) with strategy={name!r} is not offered, as rank 0 alone cannot run forward: "
                "leave log_graph out"
            )


def _plan(parts: RunParts, *, filled_later: bool) -> ShardPlan:
    precision = parts.precision
    level = precision.level if isinstance(precision, OptLevel) else None
    if level is None and type(precision) is not Precision:
        raise ConfigError(
            f"precision {precision.name!r} ({type(precision).__name__}) under a strategy that shards: give an opt level"
        )
    if level is not None and level.dynamic and level.num_losses > 1:
        raise ConfigError(
            f"OptLevel({level.name!r}, num_losses={level.num_losses}) with strategy={parts.strategy.name!r} is not offered: "
            "gradients of several losses are summed whole, and a rank has shards; leave num_losses out, or give strategy='ddp'"
        )
    if parts.strategy.offload and (parts.settings.nan_policy is not None or (level is not None and level.dynamic)):
        raise ConfigError(
            f"FSDP(offload=True) with precision {precision.name!r} and nan_policy={parts.settings.nan_policy!r} is not offered: "
            "gradients in host memory are not checked for overflow; give 'O0', 'O4' or 'O5' with nan_policy=None"
        )
    # A run may begin to accumulate only when it is resumed, with fewer ranks.
    accumulates = parts.settings.accumulates or (filled_later and parts.settings.on_world_change == KEEP_GLOBAL_BATCH)
    # Complex parameters keep their dtype at every level.
    kept = [layer for layer in parts.module.modules() if any(map(torch.is_complex, layer.parameters(recurse=False)))]
    if level is None:
        return ShardPlan(kept=frozenset(kept), accumulates=accumulates, filled_later=filled_later)
    if level.cast_model_type is not None:
        choice = {"keep_batchnorm_fp32": level.keep_batchnorm_fp32, "whole_step": level.whole_step}
        converted = set(modules_to_convert(parts.module, **choice))
        kept += [layer for layer in parts.module.modules() if layer not in converted]
    elif level.cast_model_outputs is not None:
        raise ConfigError(
            f"OptLevel({level.name!r}, cast_model_outputs=...) with a strategy that shards is not offered; leave the option out"
        )
    elif level.autocast is not None:
        # Within autocast a BatchNorm takes half inputs, and weights in the dtype of its running values.
        kept += [layer for layer in parts.module.modules() if isinstance(layer, AnyBatchNorm)]
    return ShardPlan(
        compute_dtype=level.cast_model_type or level.autocast,
        stored_dtype=None if level.master_weights else level.cast_model_type,
        kept=frozenset(kept),
        accumulates=accumulates,
        filled_later=filled_later,
    )
