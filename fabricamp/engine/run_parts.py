"""What every holder of a run shares: the session, and the parts of its fit, have these and add their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricamp.engine.optimizer_setup import SchedulerConfig
    from fabricamp.engine.report.time_spent import TimeSpent
    from fabricamp.engine.saved.resume import ResumePoint
    from fabricamp.hooks import Hooks
    from fabricamp.metrics import Metrics
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.precision.optimizer_step import OptimizerStep
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings
    from fabricamp.watchdog import StopAgreement


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RunParts:
    """The parts of one fit, validate, test or predict that are there from its beginning."""

    module: TrainingModule
    state: RunState
    strategy: Strategy
    precision: Precision
    metrics: Metrics
    hooks: Hooks
    settings: Settings
    """The Trainer's settings; some of them may change during a fit."""
    agreement: StopAgreement
    resume_point: ResumePoint
    time_spent: TimeSpent
    optimizers: list[Optimizer] = field(default_factory=list)
    """Empty until a fit has asked for them; in an evaluation those of the module's last fit."""
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    """The step of each optimizer, in a fit."""
    schedulers: list[SchedulerConfig] = field(default_factory=list)
