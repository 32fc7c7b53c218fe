"""The parts that the loop and the update of a fit use, and the limits that end a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricamp.arguments.cadence import Every, validation_times
from fabricamp.engine.validation_cadence import batches_between_validations
from fabricamp.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When training ends and validation runs: the Trainer's settings, which may change during a fit, and derived values."""

    settings: Settings
    deadline: float | None
    validate_every: float
    validation_times: Every | None
    """Replaces :attr:`validate_every` if validations are asked for in steps, epochs or minutes."""


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
    limits: Limits
    validate: Callable[[], bool] | None
    resume_point: ResumePoint
    together: Callable[[Iterable[Any]], Iterator[Any]]
    """Makes the ranks begin a pass over their batches together."""
    meet_at_end_of_data: Callable[[int], None]
    renew: Callable[[FitParts], None]
    """Called before each epoch: replaces the loaders if the epoch reloads them."""


def limits_of(settings: Settings, length: float, started: float) -> Limits:
    """Returns the limits of a fit with ``length`` micro-batches an epoch that began at ``started`` (of ``time.monotonic``)."""
    accumulate = settings.accumulate_grad_batches
    if settings.partial_window == "drop" and 0 < length < accumulate:
        raise ConfigError(
            f"partial_window='drop' with {length} batches an epoch and accumulate_grad_batches={accumulate} would never make a "
            "step; give 'step' or 'carry', or accumulate fewer"
        )
    interval = settings.val_check_interval
    every = 0.0
    times = None
    if isinstance(interval, int | float):
        every = batches_between_validations(settings, interval, length)
    else:
        times = validation_times(interval)
    return Limits(
        settings=settings,
        deadline=None if settings.max_time is None else started + settings.max_time,
        validate_every=every,
        validation_times=times,
    )
