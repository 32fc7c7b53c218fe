"""Shared by callbacks that monitor a metric: when they check it, and the messages for a missing metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.errors import nearest
from fabricamp.metrics.values import number_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fabricamp.trainer import Trainer


def has_validation(trainer: Trainer) -> bool:
    """Returns whether ``fit`` runs any validation batch."""
    return sum(trainer.num_val_batches) > 0


def checks_at_train_epoch_end(trainer: Trainer) -> bool:
    """Returns whether all metrics are known at the end of each train epoch: validation runs at the end of each, or never."""
    if not has_validation(trainer):
        return True
    interval = trainer.val_check_interval
    # The integer 1 means "after every batch", and 1 == 1.0.
    return trainer.check_val_every_n_epoch == 1 and isinstance(interval, float) and interval == 1.0


def monitored_value(trainer: Trainer, monitor: str) -> float | None:
    """Returns the last epoch value of ``monitor``; None if it was not logged."""
    value = trainer.monitored_metrics.get(monitor)
    return None if value is None else float(value)


def metric_tensors(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns metrics as tensors on the CPU, as Lightning's methods get them."""
    return {
        name: value.detach().cpu() if isinstance(value, Tensor) else number_tensor(value)
        for name, value in metrics.items()
    }


def missing_monitor(trainer: Trainer, what: str, monitor: str) -> str:
    """Returns the message for a metric that ``what`` needs and that was not logged."""
    return missing_in(trainer.monitored_metrics, what, monitor)


def missing_in(metrics: Collection[str], what: str, monitor: str) -> str:
    """Returns the message for a metric that ``what`` needs and that is not in ``metrics``."""
    known = sorted(metrics)
    exist = "nothing was logged so far; call self.log(name, value) in your steps"
    if known:
        exist = f"logged so far: {', '.join(known)}"
    return f"{what} found no metric {monitor!r}{nearest(monitor, known)} ({exist})"
