"""Lightning's names for the types in signatures of steps, loaders and ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as ReduceLROnPlateau

from fabricamp.engine.optimizer_setup import SchedulerConfig

LRSchedulerConfig = SchedulerConfig

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion

_NUMBER = int | float
_METRIC = Any
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]


class LRSchedulerConfigType(TypedDict):
    """The dict that says when a learning-rate scheduler steps."""

    scheduler: LRSchedulerTypeUnion
    name: NotRequired[str | None]
    interval: NotRequired[str]
    frequency: NotRequired[int]
    reduce_on_plateau: NotRequired[bool]
    monitor: NotRequired[str | None]
    strict: NotRequired[bool]


class OptimizerConfig(TypedDict):
    """The dict of an optimizer alone."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """The dict of an optimizer and its learning-rate scheduler."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfigType]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
"""What ``configure_optimizers`` may return."""
