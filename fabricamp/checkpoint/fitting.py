"""A checkpoint that loads but does not fit what it is loaded into: told as such, before training goes on from it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.checkpoint.file import read_checkpoint
from fabricamp.checkpoint.foreign import fit_names
from fabricamp.errors import CheckpointError, FabricampError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.strategies.base import Strategy

__all__ = ["check_counters", "check_optimizer_states", "fitting", "read_together", "step_due_schedules"]

_LIKE_THE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "master_param",
    }
)
"""Names of torch's and fabricamp's optimizers for state that has the parameter's shape: they do not look when they load."""

_COMPLETE = ("epoch", "global_step", "loops", "optimizer_states", "lr_schedulers", "amp", "callbacks", "data")
_COUNTERS = ("epoch", "global_step")
_POSITION = ("batch_idx", "batches_done")


def read_together(path: str, module: nn.Module, strategy: Strategy) -> dict[str, Any]:
    """Returns the checkpoint, on every rank or on none: where one cannot read it, all raise its :class:`CheckpointError`.

    The weights of an apex script's network are put below the submodule of ``module`` that they fit.
    """
    checkpoint, problem = None, ""
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        problem = str(error)
    problems = [one for one in strategy.all_gather_object(problem) if one]
    if checkpoint is None or problems:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))
    if checkpoint.get("source") == "apex":
        checkpoint["state_dict"] = fit_names(checkpoint["state_dict"], set(module.state_dict()))
    return checkpoint


@contextlib.contextmanager
def fitting(path: str, what: str) -> Iterator[None]:
    """Within it whatever goes wrong is a :class:`CheckpointError` that says that ``what`` of ``path`` does not fit."""
    try:
        yield
    except FabricampError:
        raise
    except Exception as error:  # the file may hold anything, and the loaders are torch's and the user's
        raise CheckpointError(
            f"{path}: its {what} cannot be restored here ({type(error).__name__}: {error!s:.300}); it is damaged, or of another "
            "module, other optimizers or callbacks: give the checkpoint that this script wrote"
        ) from error


def check_counters(checkpoint: dict[str, Any], path: str) -> None:
    """Raises :class:`CheckpointError` where a counter is no whole number from 0, or a part of fabricamp's own file is missing."""
    missing = [name for name in _COMPLETE if name not in checkpoint]
    if missing and "source" not in checkpoint and "optimizer_states" in checkpoint:
        raise CheckpointError(f"{path} is incomplete: it has no {', '.join(map(repr, missing))}; use another one")
    position = checkpoint.get("loops", {}).get("fit", {})
    counters = {name: checkpoint[name] for name in _COUNTERS if name in checkpoint}
    counters.update({f"loops.fit.{name}": position[name] for name in _POSITION if name in position})
    for name, value in counters.items():
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{path}: its {name} is {value!r}, not a whole number from 0; use an older checkpoint"
            )


def check_optimizer_states(optimizers: Sequence[Optimizer], path: str) -> None:
    """Raises :class:`CheckpointError` where state that goes with a parameter, value by value, has another shape."""
    for number, optimizer in enumerate(optimizers):
        for parameter, state in getattr(optimizer, "state", {}).items():
            if not isinstance(state, dict) or not isinstance(parameter, Tensor):
                continue
            for name, value in state.items():
                if name in _LIKE_THE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                    raise CheckpointError(
                        f"{path}: {name} of optimizer {number} ({type(optimizer).__name__}) has shape {tuple(value.shape)} for a "
                        f"parameter of shape {tuple(parameter.shape)}; give the checkpoint that this script wrote"
                    )


def step_due_schedules(checkpoint: dict[str, Any], configs: Sequence[Any]) -> None:
    """Steps the schedules of an epoch that Lightning's checkpoint was written at the end of: there they come after it."""
    if not checkpoint.get("loops", {}).get("fit", {}).get("schedules_due"):
        return
    for config in configs:
        if config.interval == "epoch" and not config.reduce_on_plateau and checkpoint["epoch"] % config.frequency == 0:
            config.scheduler.step()
