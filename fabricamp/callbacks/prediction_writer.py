"""Writes predictions: a base class for callbacks."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal

from fabricamp.arguments.checks import check_choice
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp._utils.types import AnyBatch, AnyOutput
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class WriteInterval(enum.StrEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether predictions are written after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether predictions are written after all batches."""
        return self is not WriteInterval.BATCH


class BasePredictionWriter(Callback):
    """Gives each rank its predictions with their samples' indices; override the methods below to write them.

    With ``trainer.predict(..., return_predictions=False)`` the predictions are not kept anywhere else.

    Args:
        write_interval: "batch" calls :meth:`write_on_batch_end`, "epoch" :meth:`write_on_epoch_end`, "batch_and_epoch" both.

    Raises:
        ConfigError: for another interval, and if a method that the interval needs is not overridden.

    Example:
        >>> class Files(BasePredictionWriter):
        ...     def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        ...         torch.save([predictions, batch_indices], f"predictions_{trainer.global_rank}.pt")
        >>> writer = Files(write_interval="epoch")
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__()
        check_choice(
            f"{type(self).__name__} write_interval", write_interval, tuple(interval.value for interval in WriteInterval)
        )
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        prediction: object,
        batch_indices: Sequence[int] | None,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes the result of ``predict_step`` for ``batch``.

        ``batch_indices`` are the indices of the batch's samples in the dataset; None if unknown: another loader than torch's
        DataLoader, an IterableDataset, workers with ``in_order=False``.
        """
        raise self._not_overridden("write_on_batch_end")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Writes the results of ``predict_step`` on this rank, in host memory.

        ``predictions`` is a list with an item per batch; with several loaders, a list of such lists.  ``batch_indices`` has an
        item per loader, even with one loader: a list of indices per batch, or None if the loader's indices are unknown.
        """
        raise self._not_overridden("write_on_epoch_end")

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises :class:`ConfigError` before the first batch if a method that the interval needs is not overridden."""
        super().setup(trainer, pl_module, stage)
        if stage != "predict":
            return
        methods = {"write_on_batch_end": self.interval.on_batch, "write_on_epoch_end": self.interval.on_epoch}
        for name, is_called in methods.items():
            if is_called and getattr(type(self), name) is getattr(BasePredictionWriter, name):
                raise self._not_overridden(name)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Calls :meth:`write_on_batch_end` if the interval asks for it."""
        if self.interval.on_batch:
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Calls :meth:`write_on_epoch_end` if the interval asks for it."""
        if self.interval.on_epoch:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)

    def _not_overridden(self, name: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}(write_interval={self.interval.value!r}) calls {name}, which it does not have: write it, "
            "or give another write_interval"
        )
