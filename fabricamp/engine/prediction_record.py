"""Records for a BasePredictionWriter: the sample indices of each batch, and this rank's predictions of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricamp.callbacks.prediction_writer import BasePredictionWriter
from fabricamp.data import move_to_device
from fabricamp.data.recording import note_indices
from fabricamp.lightning.given import writes_predictions
from fabricamp.say_once import say_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.trainer import Trainer

_HOST = torch.device("cpu")


class PredictionRecord:
    """Records the predict loop; its ``loaders`` are read in place of the given ones.  ``keeps``: it keeps the complete epoch.

    Without a callback that ``writes`` there are no indices, and the predictions are those that ``predict`` returns, if it does.
    """

    def __init__(self, loaders: Sequence[Any], *, writes: bool, keeps: bool) -> None:
        noted = [note_indices(loader) if writes else (loader, None) for loader in loaders]
        self.writes = writes
        self.loaders = [loader for loader, _ in noted]
        self.indices: list[Any] | None = None
        """The sample indices of the present batch; None if its loader does not know them."""
        self.epoch_indices: list[list[list[Any]] | None] = [None if one is None else [] for _, one in noted]
        self.predictions: list[list[Any]] = [[] for _ in loaders]
        self._noted = [one for _, one in noted]
        self._keeps = keeps

    def begin_batch(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Notes the batch's indices; called before the hooks of a batch's start."""
        noted, epoch = self._noted[dataloader_idx], self.epoch_indices[dataloader_idx]
        self.indices = None if noted is None else noted.of_batch(batch_idx)
        if self._keeps and epoch is not None and self.indices is not None:
            epoch.append(self.indices)

    def share(self, outputs: list[list[Any]]) -> None:
        """Makes the loop's ``outputs`` the predictions, unless the record keeps its own."""
        if not self._keeps:
            self.predictions = outputs

    def end_batch(self, output: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keeps the output, in host memory, if the epoch is kept; called after the hooks of a batch's end."""
        if self._keeps:
            self.predictions[dataloader_idx].append(move_to_device(output, _HOST))


def open_record(trainer: Trainer, loaders: Sequence[Any]) -> PredictionRecord:
    """Returns the record that the Trainer's callbacks and the module read."""
    writers: list[Any] = [
        one for one in trainer.callbacks if isinstance(one, BasePredictionWriter) or writes_predictions(one)
    ]
    record = PredictionRecord(loaders, writes=bool(writers), keeps=any(one.interval.on_epoch for one in writers))
    if writers and trainer.is_global_zero:
        for loader, epoch in zip(loaders, record.epoch_indices, strict=True):
            if epoch is None:
                say_once(
                    f"{type(writers[0]).__name__} gets batch_indices=None: this {type(loader).__name__} does not tell "
                    "which samples a batch has; torch's DataLoader over a dataset with indices does"
                )
    return record
