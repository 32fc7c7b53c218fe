"""Random augmentation that is the same wherever and whenever a sample is read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fabricamp.rng import seeded


class SeededDataset(Dataset[Any]):
    """A map-style ``dataset`` whose samples are read with Python, NumPy and torch (CPU) seeded from their index and a tag.

    Its indices are pairs (tag, index), where the tag, a tuple of numbers, is the epoch's: so workers which outlive an epoch know
    of it too.  Around each sample every generator is left as it was.  Whatever else is asked of it is the dataset's.

    >>> SeededDataset(["a", "b"])[(0, 3), 1]
    'b'
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: tuple[tuple[int, ...], int]) -> Any:
        tag, index = place
        with seeded(*tag, index):
            return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # Not for what is missing while a copy or a pickle is being built; and samples are never read past __getitem__.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
