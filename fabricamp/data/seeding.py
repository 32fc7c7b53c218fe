"""Random augmentation that is the same wherever and whenever a sample is read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fabricamp.rng import seeded

__all__ = ["SeededDataset"]


class SeededDataset(Dataset[Any]):
    """A map-style ``dataset`` whose samples are read with Python, NumPy and torch (CPU) seeded from (seed, epoch, index).

    Its indices are pairs (epoch, index), so that workers which outlive an epoch know it too.  Around each sample every
    generator is left as it was.  Whatever else is asked of it is the dataset's.

    >>> SeededDataset(["a", "b"], seed=0)[3, 1]
    'b'
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        with seeded(self.seed, epoch, index):
            return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # Not for what is missing while a copy or a pickle is being built; and samples are never read past __getitem__.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
