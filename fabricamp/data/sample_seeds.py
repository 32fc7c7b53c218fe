"""Random augmentation that depends only on the sample and the epoch, not on the process or the time of the read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fabricamp.rng import seeded


class SeededDataset(Dataset[Any]):
    """A map-style ``dataset`` that reads each sample with Python, NumPy and torch (CPU) seeded from its index and a tag.

    Its indices are pairs (tag, index).  The tag is a tuple of numbers for the epoch; it comes with the index so that persistent
    workers know the current epoch.  The generators are restored after each sample.  Other attributes are those of ``dataset``.

    >>> SeededDataset(["a", "b"])[(0, 3), 1]
    'b'
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, tagged: tuple[tuple[int, ...], int]) -> Any:
        tag, index = tagged
        with seeded(*tag, index):
            return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # "dataset" is missing while copy or pickle builds the object, which look for dunder methods.  Torch's loader looks for the
        # dataset's __getitems__, which would read samples without the seeds.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
