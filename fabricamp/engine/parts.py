"""The parts that the loop and the update of a fit use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim import Optimizer

    from fabricamp.data import Feed
    from fabricamp.engine.optimizer_setup import SchedulerConfig
    from fabricamp.engine.resume import ResumePoint
    from fabricamp.hooks import Hooks
    from fabricamp.metrics import Metrics
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Clip, Precision
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings
    from fabricamp.watchdog import LoopRequests, StopAgreement


@dataclass(slots=True, kw_only=True)
class FitParts:
    """The parts of a fit."""

    module: TrainingModule
    state: RunState
    strategy: Strategy
    precision: Precision
    metrics: Metrics
    hooks: Hooks
    agreement: StopAgreement
    requests: LoopRequests
    feed: Feed
    loader: Any
    step: Callable[..., Any]
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    clip: Clip | None
    settings: Settings
    """The Trainer's settings; some of them may change during a fit."""
    length: float
    """The number of micro-batches of an epoch; inf if unknown."""
    validate: Callable[[], bool] | None
    resume_point: ResumePoint
    together: Callable[[Iterable[Any]], Iterator[Any]]
    """Makes the ranks begin a pass over their batches together."""
    meet_at_end_of_data: Callable[[int], None]
    renew: Callable[[FitParts], None]
    """Called before each epoch: replaces the loaders if the epoch reloads them."""
