"""Writes predictions: a base class for callbacks."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal

from fabricamp.arguments.checks import check_choice
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class WriteInterval(enum.StrEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether after all batches."""
        return self is not WriteInterval.BATCH


class BasePredictionWriter(Callback):
    """Gives each rank its predictions, with their samples' indices: derive from it, and write them in the methods below.

    With ``trainer.predict(..., return_predictions=False)`` they are not kept anywhere else.

    Args:
        write_interval: "batch" calls :meth:`write_on_batch_end`, "epoch" :meth:`write_on_epoch_end`, "batch_and_epoch" both.

    Raises:
        ConfigError: for another interval, and if the method that it calls is not overridden.

    Example:
        >>> class Files(BasePredictionWriter):
        ...     def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        ...         torch.save([predictions, batch_indices], f"predictions_{trainer.global_rank}.pt")
        >>> writer = Files(write_interval="epoch")
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        check_choice(f"{type(self).__name__} write_interval", write_interval, tuple(one.value for one in WriteInterval))
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes what ``predict_step`` returned for ``batch``.

        ``batch_indices`` are the indices of its samples in the dataset; None where they cannot be known: another loader than
        torch's DataLoader, an IterableDataset, workers with ``in_order=False``.
        """
        raise self._not_overridden("write_on_batch_end")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Writes what ``predict_step`` returned on this rank, on the host: a list of batches; of several loaders a list each.

        ``batch_indices`` has a list per loader, also of one, with a list of indices per batch; None for a loader of which they
        cannot be known.
        """
        raise self._not_overridden("write_on_epoch_end")

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises before anything is predicted that nobody would write."""
        super().setup(trainer, pl_module, stage)
        if stage != "predict":
            return
        due = {"write_on_batch_end": self.interval.on_batch, "write_on_epoch_end": self.interval.on_epoch}
        for name, called in due.items():
            if called and getattr(type(self), name) is getattr(BasePredictionWriter, name):
                raise self._not_overridden(name)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Has the batch written."""
        if self.interval.on_batch:
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Has all batches written."""
        if self.interval.on_epoch:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)

    def _not_overridden(self, name: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}(write_interval={self.interval.value!r}) calls {name}, which it does not have: write it, "
            "or give another write_interval"
        )
