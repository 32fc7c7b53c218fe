"""Samplers: torch's order in training, every sample once in evaluation, and a start at any position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from fabricamp.data import EvalSampler, TrainSampler
from fabricamp.data.orders import GivenOrder, SeededOrder
from fabricamp.data.samplers import GivenSampler

sizes = st.integers(0, 70)
worlds = st.integers(1, 9)


def seeded(size, *, shuffle, seed, **options):
    return TrainSampler(SeededOrder(size, shuffle=shuffle, seed=seed), **options)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 70),
    world_size=worlds,
    epoch=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_training_order_is_torchs(size, world_size, epoch, seed, shuffle, drop_last):
    for rank in range(world_size):
        options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "rank": rank}
        theirs = DistributedSampler(range(size), num_replicas=world_size, **options)
        ours = seeded(size, world_size=world_size, **options)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@settings(max_examples=100, deadline=None)
@given(size=sizes, world_size=worlds)
def test_evaluation_reads_every_sample_once(size, world_size):
    shares = [list(EvalSampler(size, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert sorted(index for share in shares for index in share) == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [len(EvalSampler(size, rank=rank, world_size=world_size)) for rank in range(world_size)] == [
        *map(len, shares)
    ]


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 70), world_size=worlds, start=st.integers(0, 80), epoch=st.integers(0, 3))
def test_start_leaves_out_the_first_samples_once(size, world_size, start, epoch):
    def sampler() -> TrainSampler:
        made = seeded(size, shuffle=True, seed=3, rank=world_size - 1, world_size=world_size)
        made.set_epoch(epoch)
        return made

    resumed = sampler()
    resumed.start = start * world_size
    straight = list(sampler())
    assert len(resumed) == len(straight[start:])
    assert list(resumed) == straight[start:]
    assert list(resumed) == straight
    assert len(resumed) == len(straight)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 70), start=st.integers(0, 70), before=worlds, after=worlds, shuffle=st.booleans())
def test_another_number_of_ranks_goes_on_in_the_same_order(size, start, before, after, shuffle):
    def read(world_size, start):
        """Returns the samples of all ranks in the order in which they are read."""
        shares = []
        for rank in range(world_size):
            sampler = seeded(size, shuffle=shuffle, seed=3, rank=rank, world_size=world_size)
            sampler.start = start
            shares.append(list(sampler))
        return [index for places in zip(*shares, strict=True) for index in places]

    straight, resumed = read(before, 0), read(after, start)
    assert resumed[: size - start] == straight[start:size]
    assert len(resumed) % after == 0
    assert 0 <= len(resumed) - max(size - start, 0) < after


def test_indices_with_their_tag():
    sampler = seeded(5, shuffle=True, seed=2, tags=True)
    plain = seeded(5, shuffle=True, seed=2)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert list(sampler) == [((2, epoch), index) for index in plain]


def test_start_reads_no_data():
    read: list[int] = []

    class Data(list):
        def __getitem__(self, index):
            read.append(index)
            return index

    data = Data(range(1000))
    sampler = seeded(1000, shuffle=False, seed=0)
    sampler.start = 990
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[990, 991, 992, 993, 994], [995, 996, 997, 998, 999]]
    assert read == list(range(990, 1000))


def test_epochs_differ_and_repeat():
    sampler = seeded(50, shuffle=True, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_more_samples_than_a_chunk():
    size = (1 << 16) * 2 + 3
    assert sorted(seeded(size, shuffle=True, seed=0)) == list(range(size))


def test_empty_dataset_gives_nothing():
    sampler = seeded(0, shuffle=True, seed=0, rank=1, world_size=2)
    assert list(sampler) == []
    assert list(BatchSampler(sampler, 2, drop_last=False)) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_order_does_not_touch_the_global_generator(world_size):
    import torch

    before = torch.get_rng_state()
    list(seeded(20, shuffle=True, seed=0, world_size=world_size))
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 45), st.booleans())
def test_a_users_order_is_dealt_out_by_torchs_rule(size, ranks, start, are_batches):
    items = [(7 * index) % 41 for index in range(size)]
    given_order = [[item, item] for item in items] if are_batches else items
    shares = []
    for rank in range(ranks):
        order = GivenOrder(given_order, from_first=lambda value: value, is_first=rank == 0)
        sampler = GivenSampler(given_order, range(9), order, rank=rank, world_size=ranks)
        sampler.enter(start, [])
        length = len(sampler)
        shares.append(list(sampler))
        assert len(shares[-1]) == length
    left = max(size - start, 0)
    dealt = [item for round_ in zip(*shares, strict=True) for item in round_]
    assert dealt == [given_order[(start + index) % size] for index in range(-(-left // ranks) * ranks)]
