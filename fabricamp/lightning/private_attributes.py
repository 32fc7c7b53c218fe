"""Attributes of Lightning's internals that libraries read, as views of the Trainer; each names a library that reads it.

The Trainer and its loops look here for a name that they lack, so a program that reads none of these does not import the module.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.trainer import Trainer
    from fabricamp.trainer.loops import EpochLoop, EvaluationLoop, FitLoop
    from fabricamp.trainer.properties import TrainerProperties


def _accelerator_connector(trainer: Trainer) -> SimpleNamespace:
    """Returns whether there are several processes, and the devices of the processes on this node.

    ``is_distributed`` is read by Lightning's own Tuner and ``all_gather``, by optuna-integration and darts; ``_parallel_devices``
    by pina.
    """
    devices = [
        torch.device("cpu") if trainer.device_type == "cpu" else torch.device(trainer.device_type, index)
        for index in trainer.device_ids
    ]
    return SimpleNamespace(is_distributed=trainer.world_size > 1, _parallel_devices=devices)


def _restarting(loop: FitLoop | EpochLoop) -> bool:
    """Whether the fit was resumed from a checkpoint and has not reached its first batch; read by Lightning's own callbacks."""
    session = loop._trainer._runner.session
    return session is not None and bool(session.resume_point.resumed)


class _DataSource:
    """Where a loop's loaders come from."""

    def __init__(self, loop: EvaluationLoop) -> None:
        self._session = loop._trainer._runner.session
        self._name = loop._kind

    def is_defined(self) -> bool:
        """Returns whether loaders were given, or a method returns them; read by gluonts."""
        return self._session is not None and bool(self._session.data.defines(self._name))


class _StepCount:
    """The number of steps of a fit; pina's solvers step torch's optimizers themselves, and add each step to ``completed``."""

    def __init__(self, trainer: TrainerProperties) -> None:
        self._state = trainer.state

    @property
    def completed(self) -> int:
        """The number of steps, ``trainer.global_step``; if it is set, ``max_steps`` counts the new value between epochs."""
        return int(self._state.global_step)

    @completed.setter
    def completed(self, steps: int) -> None:
        self._state.global_step = steps


def _manual_optimization(loop: EpochLoop) -> SimpleNamespace:
    """The count of manual steps: ``manual_optimization.optim_step_progress.total.completed``, written by pina."""
    return SimpleNamespace(optim_step_progress=SimpleNamespace(total=_StepCount(loop._trainer)))


def _automatic_optimization(loop: EpochLoop) -> SimpleNamespace:
    """The count of the optimizer's steps: ``automatic_optimization.optim_progress.optimizer_steps``, read by schedules."""
    return SimpleNamespace(optim_progress=SimpleNamespace(optimizer_steps=loop.global_step))


def _batches_that_stepped(loop: EpochLoop) -> int:
    """The number at which values of the present step are logged; read by callbacks that call ``logger.log_metrics``."""
    return int(loop._trainer.state.logger_step(loop.global_step))


ATTRIBUTES: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("Trainer", "_accelerator_connector"): _accelerator_connector,
    ("FitLoop", "restarting"): _restarting,
    ("EpochLoop", "restarting"): _restarting,
    ("EpochLoop", "automatic_optimization"): _automatic_optimization,
    ("EpochLoop", "_batches_that_stepped"): _batches_that_stepped,
    ("EpochLoop", "manual_optimization"): _manual_optimization,
    ("EvaluationLoop", "_data_source"): _DataSource,
}
"""Maps (class, name) to a function of the object that returns the attribute."""
