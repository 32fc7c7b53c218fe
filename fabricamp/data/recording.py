"""Records the sample indices of a loader's batches as the loader requests them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp.data.resident import ResidentLoader


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
            self._noted.append(_listed(asked))
            yield asked

    def of_batch(self, batch_idx: int) -> list[Any]:
        """Returns the indices of a batch and forgets those of earlier batches."""
        while self._first < batch_idx:
            self._noted.popleft()
            self._first += 1
        return self._noted[0]


def note_indices(loader: Any) -> tuple[Any, NotedIndices | None]:
    """Returns a copy of ``loader`` that records its batches' indices, and the record; (``loader``, None) if they are unknowable."""
    if isinstance(loader, ResidentLoader):
        batches = NotedIndices(torch.split(loader.sampler.taken(), loader.batch_size))
        list(batches)
        return loader, batches
    if not _asks_in_order(loader):
        return loader, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    noted, copied = NotedIndices(getattr(loader, name)), copy.copy(loader)
    # vars() bypasses DataLoader's __setattr__, which refuses another sampler.  The loader's persistent workers have the loader's
    # own sampler, so the copy starts workers for its single pass.
    vars(copied).update({name: noted, "_iterator": None, "persistent_workers": False})
    return copied, noted


def _asks_in_order(loader: Any) -> bool:
    """Whether ``loader`` yields its batches in the order in which its sampler yields indices."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    own = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and (loader.in_order or loader.num_workers == 0)


def _listed(asked: Any) -> list[Any]:
    """Returns the indices of one batch as a list; without a batch size, a sampler may yield a single index."""
    if hasattr(asked, "tolist"):
        asked = asked.tolist()
    return list(asked) if isinstance(asked, list | tuple | range) else [asked]
