"""What a fit is made of: the parts that the loop and the update work with, and the limits that end a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from fabricamp.data import Feed
    from fabricamp.hooks import Hooks
    from fabricamp.metrics import Metrics
    from fabricamp.module import TrainingModule
    from fabricamp.optimization import SchedulerConfig
    from fabricamp.precision.base import Clip, Precision
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.watchdog import StopAgreement

__all__ = ["FitParts", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When training ends, and what happens every so often.  Checked by the Trainer; None or infinity: no limit."""

    max_epochs: float
    max_steps: float
    min_epochs: int
    min_steps: int
    deadline: float | None
    accumulate: int
    log_every: int
    validate_every: float
    validate_every_epochs: int | None


@dataclass(slots=True, kw_only=True)
class FitParts:
    """What a fit is made of."""

    module: TrainingModule
    state: RunState
    strategy: Strategy
    precision: Precision
    metrics: Metrics
    hooks: Hooks
    agreement: StopAgreement
    feed: Feed
    loader: Any
    step: Callable[..., Any]
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    clip: Clip | None
    limits: Limits
    validate: Callable[[], None] | None
