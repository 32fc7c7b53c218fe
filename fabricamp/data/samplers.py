"""Which samples a rank reads: its share of an epoch's order, from any place on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from fabricamp.data.orders import DRAWN, IN_ORDER, SEEDED, Draw, DrawnOrder, Order, numbers


class TrainSampler(Sampler[Any]):
    """This rank's share of an epoch's order, which a resumed run can enter at any place.

    Every rank gets the same number of samples: the first ones are repeated at the end, or (``drop_last``) the last ones
    left out.  ``start`` is how many samples, those of all ranks together, the next iteration leaves out (and ``len``, until
    then); no data is read for them.  It may be any number, so another number of ranks can go on in the same order.
    With ``tags`` each index comes as (tag, index): for :class:`SeededDataset`.

    The order is ``order`` until :meth:`go_on` is told of a run that has another of ``orders``.  ``earlier_seed`` is what runs
    shuffled by whose checkpoints have no word of it.
    """

    def __init__(
        self,
        order: Order,
        *others: Order,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        tags: bool = False,
        earlier_seed: int = 0,
    ) -> None:
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.tags = tags
        self.start = 0
        self.read_past = False
        """Whether a place in a pass is come to by reading: one that was begun before such orders could be entered."""
        self._orders: dict[str, Order] = {one.rule: one for one in (order, *others)}
        self._earlier_seed = earlier_seed
        self._rounding = 0 if drop_last else world_size - 1

    @property
    def dataset_size(self) -> int:
        """The number of samples in an epoch, those of all ranks together."""
        return self.order.size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.order.epoch = epoch

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Makes the next iteration go on behind ``start`` samples of the one of which ``draws`` were noted."""
        self.start = start
        self.order.enter(start, draws)

    def go_on_as_before(self) -> None:
        """Goes on by the rule of runs whose checkpoints have no word of it: shuffled by a seed, or used as they were."""
        self.go_on({"rule": SEEDED, "seed": self._earlier_seed})
        self.read_past = self.order.rule == DRAWN

    def go_on(self, state: dict[str, Any], draws: Sequence[Draw] = ()) -> None:
        """Goes on by the rule of the run whose order gave ``state``, whatever the number of its ranks."""
        order = self._orders.get(state["rule"])
        if order is not None:
            order.load_state_dict(state, draws)
            self.order = order

    def __len__(self) -> int:
        return max(self.order.size - self.start + self._rounding, 0) // self.world_size

    def __iter__(self) -> Iterator[Any]:
        if self.world_size > 1:
            indices = numbers(self.taken())
        else:
            start, self.start = self.start, 0
            indices = self.order.behind(start)
        return self._tagged(indices) if self.tags else indices

    def taken(self) -> Tensor:
        """All that the next iteration would give, int64."""
        start, length, self.start = self.start, len(self), 0
        places = torch.arange(length, dtype=torch.int64, device="cpu") * self.world_size + start + self.rank
        if self.order.size > 0:
            places %= self.order.size
        return self.order.all()[places]

    def _tagged(self, indices: Iterator[int]) -> Iterator[Any]:
        for index in indices:  # the order knows its tag once it is drawn
            yield from zip(itertools.repeat(self.order.tag), itertools.chain([index], indices), strict=False)


class DrawingSampler(TrainSampler, RandomSampler):
    """One process's samples in the order that torch's ``RandomSampler`` draws; to others it is the loader's own sampler."""

    def __init__(self, sampler: RandomSampler, *orders: Order, **options: Any) -> None:
        RandomSampler.__init__(self, sampler.data_source, sampler.replacement, len(sampler), sampler.generator)
        TrainSampler.__init__(self, *orders, **options)


class SharingSampler(TrainSampler, DistributedSampler[Any]):
    """One rank's share of the samples; to others it is torch's ``DistributedSampler``."""

    def __init__(self, dataset: Any, *orders: Order, rank: int, world_size: int, **options: Any) -> None:
        shuffle, seed = orders[0].rule != IN_ORDER, getattr(orders[0], "seed", 0)
        DistributedSampler.__init__(self, dataset, world_size, rank, shuffle=shuffle, seed=seed)
        TrainSampler.__init__(self, *orders, rank=rank, world_size=world_size, **options)
        # That of a run which one process began, as RandomSampler has it.
        self.generator = next((one.generator for one in orders if isinstance(one, DrawnOrder)), None)


class EvalSampler(Sampler[int]):
    """This rank's share of an evaluation, in order: each sample is on one rank.

    Samples are dealt out one by one, so that a rank may get one less than another; or in batches, ``block`` samples each, so that
    batch 0 of every rank, then batch 1 and so on are in the order of the dataset.
    """

    def __init__(self, dataset_size: int, *, rank: int, world_size: int, block: int = 1) -> None:
        self.dataset_size = dataset_size
        starts = range(rank * block, dataset_size, world_size * block)
        self._blocks = [range(start, min(start + block, dataset_size)) for start in starts] if block > 1 else [starts]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._blocks)

    def taken(self) -> Tensor:
        """All that an iteration gives, int64."""
        return torch.tensor([*self], dtype=torch.int64, device="cpu")
