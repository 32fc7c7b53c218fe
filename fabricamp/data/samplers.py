"""Samplers for a rank's share of an epoch's order, from any position on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from fabricamp._utils.types import StateDict
from fabricamp.data.orders import IN_ORDER, Draw, DrawnOrder, GivenOrder, Order, numbers
from fabricamp.errors import ConfigError
from fabricamp.rng import seeded


class TrainSampler(Sampler[Any]):
    """Samples this rank's share of an epoch's order, which a resumed run can enter at any position.

    Every rank gets the same number of samples: the first samples are repeated at the end, or (``drop_last``) the last ones are
    left out.  ``start`` is the number of samples, of all ranks together, that the next iteration skips without reading data;
    ``len`` leaves them out until then, too.  It may be any number, so another number of ranks can continue in the same order.
    With ``tags``, each index comes as (tag, index), for :class:`SeededDataset`.

    The order is ``order`` until :meth:`resume` gets the state of a run with one of ``others``.
    """

    def __init__(
        self,
        order: Order,
        *others: Order,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        tags: bool = False,
    ) -> None:
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.tags = tags
        self.start = 0
        self._orders: dict[str, Order] = {known.rule: known for known in (order, *others)}
        self._rounding = 0 if drop_last else world_size - 1

    @property
    def dataset_size(self) -> int:
        """The number of samples in an epoch, of all ranks together."""
        return self.order.size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order of the next iteration follows."""
        self.order.epoch = epoch

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Makes the next iteration continue, after ``start`` samples, the iteration with the recorded ``draws``."""
        self.start = start
        self.order.enter(start, draws)

    def resume(self, state: StateDict, draws: Sequence[Draw] = ()) -> None:
        """Continues with the order that returned ``state``, whatever the number of ranks in that run."""
        order = self._orders.get(state["rule"])
        if order is not None:
            order.load_state_dict(state, draws)
            self.order = order

    def __len__(self) -> int:
        return max(self.order.size - self.start + self._rounding, 0) // self.world_size

    def __iter__(self) -> Iterator[Any]:
        if self.world_size > 1:
            indices = numbers(self.indices())
        else:
            start = self.start
            self.start = 0
            assert not isinstance(self.order, GivenOrder)  # several ranks share it
            indices = self.order.starting_at(start)
        return self._tagged(indices) if self.tags else indices

    def indices(self) -> Tensor:
        """Returns all indices of the next iteration at once, int64."""
        positions = self._positions()
        return cast("Tensor", self.order.all())[positions]

    def _positions(self) -> Tensor:
        """Returns this rank's positions in the order of the next iteration, int64."""
        start = self.start
        length = len(self)
        self.start = 0
        positions = torch.arange(length, dtype=torch.int64, device="cpu") * self.world_size + start + self.rank
        if self.order.size > 0:
            positions %= self.order.size  # repeats the first samples for ranks that would have one less
        return positions

    def _tagged(self, indices: Iterator[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        assert not isinstance(self.order, GivenOrder)
        for index in indices:  # the order has its tag only after its first index is drawn
            yield from zip(itertools.repeat(self.order.tag), itertools.chain([index], indices), strict=False)


class DrawingSampler(TrainSampler, RandomSampler):
    """The samples of a single process in the order that torch's ``RandomSampler`` draws.

    Derives from ``RandomSampler`` for code that checks with ``isinstance``.
    """

    def __init__(self, sampler: RandomSampler, *orders: Order, **options: Any) -> None:
        RandomSampler.__init__(self, sampler.data_source, sampler.replacement, len(sampler), sampler.generator)
        TrainSampler.__init__(self, *orders, **options)


class SharingSampler(TrainSampler, DistributedSampler[Any]):
    """One rank's share of the samples; derives from torch's ``DistributedSampler`` for code that checks with ``isinstance``."""

    def __init__(self, dataset: Any, *orders: Order, rank: int, world_size: int, **options: Any) -> None:
        shuffle = orders[0].rule != IN_ORDER
        DistributedSampler.__init__(
            self, dataset, world_size, rank, shuffle=shuffle, seed=getattr(orders[0], "seed", 0)
        )
        TrainSampler.__init__(self, *orders, rank=rank, world_size=world_size, **options)
        # The generator of a run that began in a single process, under RandomSampler's name for it.
        self.generator = next((order.generator for order in orders if isinstance(order, DrawnOrder)), None)


class GivenSampler(SharingSampler):
    """One rank's share of what a user's sampler or batch sampler yields: indices, or batches.

    Of a sampler without a length each rank gets one item of every round; an incomplete last round is left out, so that all ranks
    get the same number.
    """

    order: GivenOrder

    def __init__(self, sampler: Iterable[Any], dataset: Any, order: GivenOrder, *, rank: int, world_size: int) -> None:
        has_length = hasattr(dataset, "__len__")
        super().__init__(dataset if has_length else (), order, rank=rank, world_size=world_size)
        # Under the names at which the sampler's generator, and its set_epoch, are looked for.
        self.generator = getattr(sampler, "generator", None)
        for name in ("sampler", "batch_size", "drop_last"):
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    @property
    def dataset_size(self) -> int:
        """The number of items in an epoch, of all ranks together; 0 if it is not known."""
        return self.order.size if self.order.has_size else 0

    def __iter__(self) -> Iterator[Any]:
        # A generator: the order is drawn at the first item, as in a single process.
        if self.order.has_size:
            positions = self._positions()
            items = self.order.all()
            if isinstance(items, Tensor):
                yield from numbers(items[positions])
            else:
                yield from map(items.__getitem__, numbers(positions))
            return
        start = self.start
        self.start = 0
        items_in_turn = itertools.islice(self.order.in_turn(), start, None)
        while len(round_ := list(itertools.islice(items_in_turn, self.world_size))) == self.world_size:
            yield round_[self.rank]


class EvalSampler(Sampler[int]):
    """Samples this rank's share of an evaluation, in order, with each sample on exactly one rank.

    Samples are dealt out one by one, so that a rank may get one sample less than another.  With ``block`` above 1 they are dealt
    out in batches of ``block`` samples: batch 0 of every rank, then batch 1 of every rank and so on are in the dataset's order.
    """

    def __init__(self, dataset_size: int, *, rank: int, world_size: int, block: int = 1) -> None:
        self.dataset_size = dataset_size
        starts = range(rank * block, dataset_size, world_size * block)
        self._blocks = [range(start, min(start + block, dataset_size)) for start in starts] if block > 1 else [starts]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._blocks)

    def indices(self) -> Tensor:
        """Returns all indices of an iteration at once, int64."""
        return torch.tensor([*self], dtype=torch.int64, device="cpu")


class GivenEvalSampler(EvalSampler):
    """This rank's share of what a user's sampler or batch sampler yields in an evaluation, with each item on exactly one rank.

    Each rank draws a complete pass, without an exchange: a rank that is stopped in an evaluation does not come to the next loader.
    So the global generators are seeded by (``seed``, epoch) for it, and restored.
    """

    def __init__(self, sampler: Iterable[Any], *, rank: int, world_size: int, block: int, seed: int) -> None:
        self.generator = getattr(sampler, "generator", None)
        self._sampler = sampler
        self._place = {"rank": rank, "world_size": world_size, "block": block}
        self._seed = seed
        self._epoch = 0
        if hasattr(sampler, "batch_size"):
            self.batch_size = sampler.batch_size

    @property
    def dataset_size(self) -> int:  # type: ignore[override]  # of the present epoch
        """The number of items, of all ranks together."""
        return len(cast("Sized", self._sampler))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order of the next iteration follows; calls the user's own ``set_epoch``."""
        self._epoch = epoch
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            own_set_epoch = getattr(sampler, "set_epoch", None)
            if callable(own_set_epoch):
                own_set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._positions())

    def __iter__(self) -> Iterator[Any]:
        positions = self._positions()
        size = self.dataset_size
        with seeded(self._seed, self._epoch):
            items = list(itertools.islice(self._sampler, size))
        if len(items) < size:
            raise ConfigError(
                f"{type(self._sampler).__name__} announced {size} by its len() but ended after {len(items)}; make its __len__ exact"
            )
        return map(items.__getitem__, positions)

    def _positions(self) -> EvalSampler:
        return EvalSampler(self.dataset_size, **self._place)
