"""Changes the gradient accumulation (the micro-batches per step) from epoch to epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fabricamp.callbacks.base import Callback
from fabricamp.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Sets ``accumulate_grad_batches`` by epoch; before the first given epoch a step has one micro-batch.

    Master weights and strategies are set up for accumulation in the whole fit.  A resumed run uses its epoch's number, and
    continues an accumulation in progress.

    Args:
        scheduling: maps an epoch, from 0, to the number of micro-batches in a step from then on.

    Raises:
        ConfigError: for another mapping; in a fit with ``accumulate_grad_batches``, ``partial_window="carry"`` or manual
            optimization.

    Example:
        >>> scheduler = GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        super().__init__()
        is_mapping = isinstance(scheduling, Mapping)
        whole = is_mapping and all(type(epoch) is int and type(count) is int for epoch, count in scheduling.items())
        if not whole or not scheduling or min(scheduling) < 0 or min(scheduling.values()) < 1:
            kind = ConfigError if scheduling else ArgumentTypeError
            raise kind(
                f"GradientAccumulationScheduler({scheduling!r}): give a dict from an epoch (0 or more) to the micro-batches "
                "of a step from then on (1 or more), such as {0: 8, 4: 1}"
            )
        self.scheduling = {0: 1, **dict(sorted(scheduling.items()))}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Returns whether any epoch has steps of several micro-batches."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Returns the number of micro-batches per step in this epoch."""
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Gives the Trainer the schedule."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            trainer.accumulation_schedule = self.scheduling

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Removes the schedule from the Trainer."""
        trainer.accumulation_schedule = None

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Removes the schedule from the Trainer."""
        trainer.accumulation_schedule = None
