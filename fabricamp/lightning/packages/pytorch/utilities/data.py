"""Finds the number of samples of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.lightning.packages.fabric.utilities.data import has_iterable_dataset as has_iterable_dataset
from fabricamp.lightning.packages.fabric.utilities.data import has_len as has_len
from fabricamp.lightning.packages.fabric.utilities.data import sized_len as sized_len
from fabricamp.utilities.rank_zero import rank_zero_warn


def extract_batch_size(batch: Any) -> int:
    """Returns the first dimension of the first tensor in a batch; warns if others differ, raises ConfigError if there is none."""
    sizes = [size for size in dict.fromkeys(_extract_batch_size(batch)) if size is not None]
    if not sizes:
        raise ConfigError("the batch has no tensor that shows the number of samples; give self.log(batch_size=...)")
    if len(sizes) > 1:
        rank_zero_warn(
            f"the tensors of the batch differ in their first dimension; {sizes[0]} is taken for the batch size"
        )
    return sizes[0]


def _extract_batch_size(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.ndim else 1
    elif isinstance(batch, Mapping):
        yield from _extract_batch_size([*batch.values()])
    elif dataclasses.is_dataclass(batch):
        yield from _extract_batch_size([getattr(batch, field.name) for field in dataclasses.fields(batch)])
    elif isinstance(batch, Iterable) and not isinstance(batch, str):
        for part in batch:
            yield from _extract_batch_size(part)
    else:
        yield None
