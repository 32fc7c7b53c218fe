"""Records for a BasePredictionWriter: the sample indices of each batch, and this rank's predictions of an epoch.

:class:`PredictionRecord` records the predict loop; :class:`NotedIndices` records the indices that a loader's sampler yields.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.say_once import say_once
from fabricamp.callbacks.prediction_writer import BasePredictionWriter
from fabricamp.data import move_to_device
from fabricamp.data.resident import ResidentLoader
from fabricamp.habits import habits
from fabricamp.lightning.given import writes_predictions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp._utils.types import Batch, Loader, Output
    from fabricamp.trainer import Trainer


_HOST = torch.device("cpu")


class PredictionRecord:
    """Records the predict loop; its ``loaders`` are read in place of the given ones.  ``keeps``: it keeps the complete epoch.

    Without a callback that ``writes``, no indices are recorded, and the predictions are those that ``predict`` returns (if any).
    """

    def __init__(self, loaders: Sequence[Loader], *, writes: bool, keeps: bool) -> None:
        noted = [note_indices(loader) if writes else (loader, None) for loader in loaders]
        self.writes = writes
        self.loaders = [loader for loader, _ in noted]
        self.indices: list[Any] | None = None
        """The sample indices of the present batch; None if its loader does not know them."""
        self._unknown: list[Any] | None = [] if habits().unknown_indices_are_empty else None
        self.epoch_indices: list[list[list[Any]] | None] = [self._unknown if one is None else [] for _, one in noted]
        self.predictions: list[list[Output]] = [[] for _ in loaders]
        self._noted = [indices for _, indices in noted]
        self._keeps = keeps

    def begin_batch(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Notes the batch's indices; called before the hooks of a batch's start."""
        noted = self._noted[dataloader_idx]
        epoch = self.epoch_indices[dataloader_idx]
        self.indices = self._unknown if noted is None else noted.of_batch(batch_idx)
        if self._keeps and epoch is not None and noted is not None:
            epoch.append(noted.of_batch(batch_idx))

    def share(self, outputs: list[list[Output]]) -> None:
        """Makes the loop's ``outputs`` the predictions, unless the record keeps its own."""
        if not self._keeps:
            self.predictions = outputs

    def end_batch(self, output: Output, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keeps the output, in host memory, if the epoch is kept; called after the hooks of a batch's end."""
        if self._keeps:
            self.predictions[dataloader_idx].append(move_to_device(output, _HOST))


def open_record(trainer: Trainer, loaders: Sequence[Loader]) -> PredictionRecord:
    """Returns the record that the Trainer's callbacks and the module read."""
    writers: list[Any] = [
        one for one in trainer.callbacks if isinstance(one, BasePredictionWriter) or writes_predictions(one)
    ]
    record = PredictionRecord(loaders, writes=bool(writers), keeps=any(one.interval.on_epoch for one in writers))
    if writers and trainer.is_global_zero:
        for loader, epoch in zip(loaders, record.epoch_indices, strict=True):
            if epoch is None:
                say_once(
                    f"{type(writers[0]).__name__} gets batch_indices=None: this {type(loader).__name__} does not say "
                    "which samples a batch has; torch's DataLoader over a dataset with indices does"
                )
    return record


class NotedIndices:
    """Wraps a loader's sampler and records the indices of each batch; the loader may request batches ahead.

    >>> noted = NotedIndices([[3, 1], [2]])
    >>> batches = list(noted)
    >>> noted.of_batch(1)
    [2]
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler: Iterable[Any] = sampler
        self._noted: deque[list[Any]] = deque()
        self._first = 0  # the number of the batch whose indices come first in the queue

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # raises as the sampler does

    def __iter__(self) -> Iterator[Any]:
        self._noted.clear()
        self._first = 0
        for asked in self._sampler:
            indices = asked.tolist() if hasattr(asked, "tolist") else asked
            if not isinstance(indices, list | tuple | range):
                indices = [indices]  # without a batch size, a sampler may yield a single index
            self._noted.append(list(indices))
            yield asked

    def of_batch(self, batch_idx: int) -> list[Any]:
        """Returns the indices of a batch and forgets those of earlier batches."""
        while self._first < batch_idx:
            self._noted.popleft()
            self._first += 1
        return self._noted[0]


def note_indices(loader: Loader) -> tuple[Any, NotedIndices | None]:
    """Returns a copy of ``loader`` that records its batches' indices, and the record; (``loader``, None) if they are unknowable."""
    if isinstance(loader, ResidentLoader):
        batches = NotedIndices(torch.split(loader.sampler.indices(), loader.batch_size))
        list(batches)
        return loader, batches
    if not _asks_in_order(loader):
        return loader, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    noted = NotedIndices(getattr(loader, name))
    copied = copy.copy(loader)
    # vars() bypasses DataLoader's __setattr__, which refuses another sampler.  The loader's persistent workers have the loader's
    # own sampler, so the copy starts workers for its single pass.
    vars(copied).update({name: noted, "_iterator": None, "persistent_workers": False})
    return copied, noted


def _asks_in_order(loader: Loader) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` yields its batches in the order in which its sampler yields indices."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    own = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and (loader.in_order or loader.num_workers == 0)
