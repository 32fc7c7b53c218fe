"""The order of samples is the one that a loop over the loader draws; it is drawn again where a run goes on, and stays the run's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from fabricamp.data import Feed, set_epoch, wire_loader
from fabricamp.rng import isolate_rng

SIZE = 46
EPOCHS = 3


class Numbers(Dataset):
    """Gives its indices; keeps which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.read.append(index)
        return index


def make(*, batch=4, own=None, workers=0, persistent=False, **options):
    """A shuffled loader; ``own`` is its generator: none, one of its own, one for the sampler alone, or the global one."""
    generator = torch.default_generator if own == "global" else torch.Generator().manual_seed(3) if own else None
    data = Numbers()
    sampler = RandomSampler(data, **options, generator=generator)
    return DataLoader(
        data,
        batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=persistent,
        generator=None if own == "sampler" else generator,
    )


def drawn():
    """What a step draws from the global generator."""
    return float(torch.rand(()))


def by_hand(loader, epochs=EPOCHS):
    found = []
    for epoch in range(epochs):
        found += [(epoch, batch.tolist(), drawn()) for batch in loader]
        found += [(epoch, batch.tolist(), drawn()) for batch in DataLoader(range(4), 2)]  # a validation
    return found, drawn()


def wired(loader, *, rank=0, world_size=1, **options):
    return wire_loader(loader, train=True, rank=rank, world_size=world_size, seed=3, **options)


def validation():
    return wire_loader(DataLoader(range(4), 2), train=False, rank=0, world_size=1, seed=3)


def by_feed(feed, loader, found, epochs, *, first=0, behind=0, cut=None):
    """The same with a feed; returns its state where ``cut`` = (epoch, batches) are done."""
    for epoch in range(first, epochs):
        set_epoch(loader, epoch)
        for done, batch in enumerate(feed.behind(behind), behind + 1):
            found.append((epoch, batch.tolist(), drawn()))
            if feed.last:
                feed.finish()
            if (epoch, done) == cut:
                state = {**feed.state_dict(done), "rng": torch.get_rng_state()}
                let_go(feed, loader)
                return state
        behind = 0
        found += [(epoch, batch.tolist(), drawn()) for batch in Feed(validation())]
    let_go(feed, loader)
    return None


def let_go(feed, loader):
    """Ends the workers, those that stay too: where the collector does it, their queues may be gone, and it waits for 5 s each."""
    feed.close()
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator._shutdown_workers()


LOADERS = {
    "plain": {},
    "a last batch of two": {"own": "loader"},
    "whole batches": {"own": "loader", "batch": 23},
    "the sampler's generator": {"own": "sampler", "batch": 2},
    "the global generator": {"own": "global", "batch": 23},
    "replacement": {"replacement": True},
    "replacement and a generator": {"replacement": True, "own": "loader", "num_samples": 100},
    "replacement and the global one": {"replacement": True, "own": "global", "num_samples": 70},
    "fewer samples": {"num_samples": 20, "own": "loader"},
    "more samples": {"num_samples": 110, "own": "loader", "batch": 10},
    "more samples from the global one": {"num_samples": 110, "own": "global", "batch": 10},
    "workers": {"workers": 2},
    "workers and a generator": {"workers": 2, "own": "loader", "num_samples": 110},
    "workers that stay": {"workers": 2, "persistent": True},
    "workers that stay and a generator": {"workers": 1, "persistent": True, "own": "loader", "batch": 23},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_it_is_the_loops(kind):
    with isolate_rng():
        torch.manual_seed(5)
        expected, after = by_hand(make(**LOADERS[kind]))
        torch.manual_seed(5)
        loader, found = wired(make(**LOADERS[kind])), []
        by_feed(Feed(loader), loader, found, EPOCHS)
        assert (found, drawn()) == (expected, after)


@pytest.mark.parametrize("cut", ["first", "middle", "last but one", "last"])
@pytest.mark.parametrize("kind", LOADERS)
def test_it_is_drawn_again_where_a_run_goes_on(kind, cut):
    if LOADERS[kind].get("workers") and cut not in ("middle", "last"):
        pytest.skip("two cuts are enough with processes to start")
    with isolate_rng():
        torch.manual_seed(5)
        straight, after = by_hand(make(**LOADERS[kind]))
        batches = sum(place == 1 for place, _, _ in straight) - 2
        place = (1, {"first": 1, "middle": batches // 2, "last but one": batches - 1, "last": batches}[cut])
        torch.manual_seed(5)
        loader, found = wired(make(**LOADERS[kind])), []
        state = by_feed(Feed(loader), loader, found, EPOCHS, cut=place)
        assert state is not None
        torch.manual_seed(9)
        loader = wired(make(**LOADERS[kind]))
        feed = Feed(loader)
        behind = feed.load_state_dict(state)
        torch.set_rng_state(state["rng"])
        by_feed(feed, loader, found, EPOCHS, first=1, behind=behind)
        assert (found, drawn()) == (straight, after)


def test_nothing_is_read_for_what_lies_behind():
    with isolate_rng():
        loader = wired(make(replacement=True, num_samples=1000))
        feed, found = Feed(loader), []
        state = by_feed(feed, loader, found, 1, cut=(0, 240))
        again = wired(make(replacement=True, num_samples=1000))
        feed = Feed(again)
        assert [*feed.behind(feed.load_state_dict(state))]
        assert len(again.dataset.read) == 40


def test_it_follows_manual_seed_and_differs_without():
    def order():
        return [batch.tolist() for batch in wired(make())]

    with isolate_rng():
        torch.manual_seed(1)
        first = order()
        assert order() != first
        torch.manual_seed(1)
        assert order() == first


@pytest.mark.parametrize("own", [None, "loader"])
def test_the_rule_stays_whatever_the_number_of_ranks(own):
    """One process, two in mid-epoch, one again: every sample once; so with the next epochs, which both ranks order alike."""
    with isolate_rng():
        torch.manual_seed(5)
        loader, found = wired(make(own=own)), []
        state = by_feed(Feed(loader), loader, found, 1, cut=(0, 3))
        torch.manual_seed(5)
        straight, _ = by_hand(make(own=own), 1)
        order = [index for _, batch, _ in straight[:-2] for index in batch]
        seen, states = [index for _, batch, _ in found for index in batch], []
        shares = []
        for rank in range(2):
            torch.manual_seed(100 + rank)
            loader, found = wired(make(own=own), rank=rank, world_size=2), []
            feed = Feed(loader)
            behind = feed.load_state_dict(state)
            states.append(by_feed(feed, loader, found, 1, behind=behind, cut=(0, behind + 2)))
            shares.append([index for _, batch, _ in found for index in batch])
        seen += [index for pair in zip(*shares, strict=True) for index in pair]
        loader, found = wired(make(own=own)), []
        feed = Feed(loader)
        by_feed(feed, loader, found, 3, behind=feed.load_state_dict(states[0]))
        one = [index for epoch, batch, _ in found for index in batch if epoch == 0][:-4]
        assert seen + one == order
        following = []
        for rank in range(2):
            torch.manual_seed(200 + rank)
            loader, found = wired(make(own=own), rank=rank, world_size=2), []
            feed = Feed(loader)
            by_feed(feed, loader, found, 3, behind=feed.load_state_dict(states[rank]))
            following.append(found)
        for epoch in (1, 2):
            samples = [i for found in following for at, batch, _ in found for i in batch if at == epoch]
            assert sorted(samples) == sorted([*range(SIZE), *range(4), *range(4)]), "and what validation reads"


def test_the_rule_of_several_ranks_stays_one_processes_too():
    with isolate_rng():
        expected = DistributedSampler(range(SIZE), 1, 0, seed=3)
        loader, found = wired(make(), world_size=2), []
        state = by_feed(Feed(loader), loader, found, 1, cut=(0, 3))
        loader, found = wired(make(own="loader")), []
        feed = Feed(loader)
        by_feed(feed, loader, found, 2, behind=feed.load_state_dict(state))
        assert [index for epoch, batch, _ in found[:-2] for index in batch if epoch == 0][:22] == list(expected)[24:]
        expected.set_epoch(1)
        assert [index for epoch, batch, _ in found[:-2] for index in batch if epoch == 1] == list(expected)


def test_several_ranks_share_what_is_drawn_with_replacement():
    with isolate_rng():
        options = {"replacement": True, "num_samples": 20}
        shares = [[i for b in wired(make(**options), rank=rank, world_size=2) for i in b.tolist()] for rank in (0, 1)]
        torch.manual_seed(3)
        assert [index for pair in zip(*shares, strict=True) for index in pair] == list(
            RandomSampler(range(SIZE), **options)
        )


def test_samples_have_seeds_of_their_order():
    class Noise(Numbers):
        def __getitem__(self, index):
            return index, float(torch.rand(()))

    def read(seed, behind=0, state=None, ranks=1, rank=0, cut=None):
        torch.manual_seed(seed)
        loader = DataLoader(Noise(), 4, shuffle=True, collate_fn=list)
        loader = wired(loader, rank=rank, world_size=ranks, per_sample_seed=True)
        feed = Feed(loader)
        behind = feed.load_state_dict(state) if state else 0
        batches = list(itertools.islice(feed.behind(behind), cut))
        state = feed.state_dict(behind + len(batches))
        feed.close()
        return dict(sample for batch in batches for sample in batch), state

    with isolate_rng():
        straight, _ = read(1)
        assert read(1)[0] == straight
        assert read(2)[0] != straight
        first, state = read(1, cut=3)
        rest = [read(7 + rank, state=state, ranks=2, rank=rank)[0] for rank in (0, 1)]
        assert {**rest[0], **rest[1], **first} == straight


def test_the_sampler_is_torchs_to_others():
    sampler = wired(make(own="loader", replacement=True, num_samples=7)).sampler
    assert isinstance(sampler, RandomSampler)
    assert (sampler.replacement, sampler.num_samples, len(sampler)) == (True, 7, 7)
    assert sampler.generator.initial_seed() == 3
    sampler = wired(make(), rank=1, world_size=2).sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.seed, sampler.shuffle) == (2, 1, 3, True)
    loader = DataLoader(range(4), sampler=SequentialSampler(range(4)))
    assert not isinstance(wired(loader).sampler, RandomSampler)
    assert wire_loader(make(), train=False, rank=0, world_size=1, seed=3).batch_sampler is not None


def test_a_default_device_does_not_draw():
    with isolate_rng():
        torch.manual_seed(4)
        expected = list(wired(make()).sampler)
        torch.manual_seed(4)
        sampler = wired(make()).sampler
        with torch.device("meta"):
            assert list(sampler) == expected
