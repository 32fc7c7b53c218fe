"""What a checkpoint holds: gathered from the parts of a run, and given back to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricamp.checkpoint import plain
from fabricamp.errors import CheckpointError
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from fabricamp.callbacks.base import Callback
    from fabricamp.data import DataModule
    from fabricamp.module import TrainingModule
    from fabricamp.optimization import SchedulerConfig
    from fabricamp.precision.base import Precision
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

__all__ = [
    "gather_counters",
    "gather_training",
    "gather_weights",
    "restore_callbacks",
    "restore_counters",
    "restore_training",
    "restore_weights",
]


def gather_weights(
    module: TrainingModule, strategy: Strategy, precision: Precision, datamodule: DataModule | None
) -> dict[str, Any]:
    """Returns what every checkpoint holds: versions, weights (masters' values at O2 and O5), hyper-parameters."""
    from fabricamp import __version__

    checkpoint: dict[str, Any] = {
        "fabricamp_version": __version__,
        "torch_version": str(torch.__version__),
        "state_dict": precision.module_state(module, strategy.module_state(module)),
    }
    if module.hparams:
        checkpoint["hyper_parameters"] = plain(dict(module.hparams))
        if module.hparams_name:
            checkpoint["hparams_name"] = module.hparams_name
    if datamodule is not None and datamodule.hparams:
        checkpoint["datamodule_hyper_parameters"] = plain(dict(datamodule.hparams))
    return checkpoint


def gather_counters(state: RunState, repeated_batches: int) -> dict[str, Any]:
    """Returns where the run stands; an epoch that is over counts as the next one's beginning.

    ``repeated_batches`` of those done are done again by a run that goes on from here.
    """
    in_its_end = state.validating_in_fit and state.scope is Scope.NOWHERE
    return {
        "epoch": state.epoch + state.epoch_ended,
        "global_step": state.global_step,
        "loops": {
            "fit": {
                "batch_idx": 0 if state.epoch_ended else state.batch_idx - repeated_batches,
                "batches_done": state.batches_done - repeated_batches,
                "validated": state.epoch_ended or in_its_end or state.validated_at == state.batches_done,
            }
        },
    }


def gather_training(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[SchedulerConfig],
    precision: Precision,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
) -> dict[str, Any]:
    """Returns what training needs to go on beside the weights."""
    return {
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in schedulers],
        "amp": precision.state_dict(),
        "callbacks": {callback.state_key: state for callback in callbacks if (state := callback.state_dict())},
        "data": {"datamodule": datamodule.state_dict() if datamodule is not None else {}},
    }


def restore_weights(module: TrainingModule, checkpoint: dict[str, Any], path: str, *, strict: bool = True) -> None:
    """Loads the weights; raises :class:`CheckpointError` that tells a checkpoint of another model from a damaged one."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds no 'state_dict' (it has {sorted(checkpoint)}); it is not a checkpoint of a Trainer"
        )
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        own = module.state_dict()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        shapes = [
            f"{name}: {tuple(state[name].shape)} in the file, {tuple(own[name].shape)} here"
            for name in own.keys() & state.keys()
            if isinstance(own[name], torch.Tensor) and own[name].shape != state[name].shape
        ]
        details = "; ".join(
            f"{label} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for label, names in (("missing", missing), ("unexpected", unexpected), ("other shape", sorted(shapes)))
            if names
        )
        raise CheckpointError(
            f"{path} is a checkpoint of another model than this {type(module).__name__}: {details or error}; "
            "give the checkpoint that this class was trained to, or load what fits with load_state_dict(..., strict=False)"
        ) from error


def restore_training(
    checkpoint: dict[str, Any],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[SchedulerConfig],
    precision: Precision,
    datamodule: DataModule | None,
    path: str,
) -> None:
    """Gives optimizers, schedulers, precision and data what :func:`gather_training` took from them."""
    states, schedules = checkpoint.get("optimizer_states"), checkpoint.get("lr_schedulers", [])
    if states is None:
        raise CheckpointError(
            f"{path} holds weights only, so training cannot go on from it; load the weights with "
            "TrainingModule.load_from_checkpoint and start anew, or give a checkpoint saved with save_weights_only=False"
        )
    for label, given, here in (("optimizers", states, optimizers), ("schedulers", schedules, schedulers)):
        if len(given) != len(here):
            raise CheckpointError(
                f"{path} holds {len(given)} {label}, configure_optimizers returned {len(here)}; they have to match"
            )
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(schedulers, schedules, strict=True):
            config.scheduler.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit these optimizers or schedulers: {error}") from error
    precision.load_state_dict(checkpoint.get("amp", {}))
    if datamodule is not None and checkpoint.get("data", {}).get("datamodule"):
        datamodule.load_state_dict(checkpoint["data"]["datamodule"])


def restore_callbacks(checkpoint: dict[str, Any], callbacks: Sequence[Callback]) -> None:
    """Gives callbacks what they saved."""
    states = checkpoint.get("callbacks", {})
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


def restore_counters(checkpoint: dict[str, Any], state: RunState) -> None:
    """Puts the run where the checkpoint was written."""
    position = checkpoint.get("loops", {}).get("fit", {})
    state.epoch = int(checkpoint.get("epoch", 0))
    state.global_step = int(checkpoint.get("global_step", 0))
    state.batch_idx = int(position.get("batch_idx", 0))
    state.batches_done = int(position.get("batches_done", 0))
    state.validated_at = state.batches_done if position.get("validated", True) else -1
