"""Several loaders as one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor
from torch.utils.data import DataLoader

from fabricamp.data.lengths import known_length, loader_length
from fabricamp.data.samplers import TrainSampler
from fabricamp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CombinedLoader", "combine"]

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
_PASS = 0x9E3779B1
"""Between the epochs that give passes over a shorter loader their order: odd and large, as generators use 32 bits of a seed."""


class CombinedLoader:
    """One batch of every loader at a time, in the collection they came in (dict, list or tuple).

    ``max_size_cycle``: as long as the longest, shorter ones start again (in another order where they are shuffled);
    ``max_size``: as long as the longest, None for those that ended; ``min_size``: as long as the shortest;
    ``sequential``: one loader after the other, its batches as they are.

    >>> list(CombinedLoader({"a": [1, 2], "b": [3]}))
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """

    def __init__(self, loaders: dict[str, Any] | list[Any] | tuple[Any, ...], mode: Mode = "max_size_cycle") -> None:
        if mode not in get_args(Mode):
            allowed = ", ".join(repr(known) for known in get_args(Mode))
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}) is not known{nearest(mode, get_args(Mode))} (known: {allowed})"
            )
        self._keys: list[Any] = list(loaders) if isinstance(loaders, dict) else list(range(len(loaders)))
        if not self._keys:
            raise ConfigError("CombinedLoader got an empty collection; give it at least one loader")
        self.loaders = loaders
        self.mode = mode
        self._epoch = 0
        for key in self._keys:
            loader_length(loaders[key], f"CombinedLoader[{key!r}]")

    @property
    def members(self) -> list[Any]:
        """The loaders, in order."""
        return [self.loaders[key] for key in self._keys]

    def map(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """A combined loader like this one, of ``function(loader)`` of each."""
        return CombinedLoader(self._collect([function(loader) for loader in self.members]), self.mode)

    def set_epoch(self, epoch: int) -> None:
        """Remembers the epoch, from which a shorter loader that starts again derives its next order."""
        self._epoch = epoch

    def __len__(self) -> int:
        length = self._length()
        if length == math.inf:
            message = "a CombinedLoader has no len() where a loader in it has none"
            raise TypeError(message)
        return int(length)

    def __iter__(self) -> Iterator[Any]:
        if self.mode == "sequential":
            for loader in self.members:
                yield from loader
            return
        length = self._length()
        sources = [self._source(loader) for loader in self.members]
        ended = [False] * len(sources)
        count = 0
        while count < length:
            batches = [next(source) for source in sources]
            ended = [before or fresh for before, (_, fresh) in zip(ended, batches, strict=True)]
            if all(ended) or (self.mode == "min_size" and any(ended)):
                return
            yield self._collect([batch for batch, _ in batches])
            count += 1

    def _length(self) -> int | float:
        lengths = [known_length(loader) for loader in self.members]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def _source(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Endless (batch, whether the loader has ended): what follows its end is its beginning again, or None."""
        yield from ((batch, False) for batch in loader)
        rounds = 0
        while self.mode == "max_size_cycle":
            rounds += 1
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, TrainSampler):
                sampler.set_epoch(self._epoch + rounds * _PASS)
            batches = 0
            for batch in loader:
                batches += 1
                yield batch, True
            if batches == 0:
                raise ConfigError(
                    f"CombinedLoader: {type(loader).__name__} ended and cannot start again; "
                    "pass an object that can be iterated more than once, or mode='min_size'"
                )
        while True:
            yield None, True

    def _collect(self, values: list[Any]) -> Any:
        if isinstance(self.loaders, dict):
            return dict(zip(self._keys, values, strict=True))
        return values if isinstance(self.loaders, list) else tuple(values)


def combine(loaders: Any) -> Any:
    """Returns a :class:`CombinedLoader` of a dict, list or tuple of loaders; anything else (a list of batches) as it is."""
    if not isinstance(loaders, dict | list | tuple) or not loaders:
        return loaders
    if isinstance(loaders, dict):
        return CombinedLoader(loaders)
    are_loaders = [_is_loader(member) for member in loaders]
    if all(are_loaders):
        return CombinedLoader(loaders)
    if any(are_loaders):
        kinds = ", ".join(type(member).__name__ for member in loaders)
        raise ConfigError(
            f"a collection of loaders holds something else too ({kinds}); pass only loaders, or only batches"
        )
    return loaders


def _is_loader(member: Any) -> bool:
    """Whether ``member`` of a list is a loader; tensors and plain collections are batches."""
    if isinstance(member, DataLoader | CombinedLoader):
        return True
    return hasattr(member, "__iter__") and not isinstance(member, Tensor | dict | list | tuple | str | bytes)
