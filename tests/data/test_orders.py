"""The order of samples equals that of a loop over the loader; a resumed run continues in the same order."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from fabricamp import habits
from fabricamp.data import Feed, set_epoch, wire_loader
from fabricamp.rng import isolate_rng

SIZE = 46
EPOCHS = 3
VALIDATION = "validation"


class Numbers(Dataset):
    """Returns its indices; records which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.read.append(index)
        return index


def make(*, batch=4, own=None, workers=0, persistent=False, **options):
    """Returns a shuffled loader; ``own`` is its generator: none, a separate one, one only for the sampler, or the global one."""
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
    """Consumes and returns a random number, as a training step does."""
    return float(torch.rand(()))


def by_hand(loader, epochs=EPOCHS):
    found = []
    for epoch in range(epochs):
        found += [(epoch, batch.tolist(), drawn()) for batch in loader]
        found += [(VALIDATION, batch.tolist(), drawn()) for batch in DataLoader(range(4), 2)]
    return found, drawn()


@cache
def of_the_loop(kind):
    """Returns ``by_hand`` of a kind of ``LOADERS`` from seed 5; once a process, as each cut is compared with it."""
    with isolate_rng():
        torch.manual_seed(5)
        return by_hand(make(**LOADERS[kind]))


def wired(loader, *, rank=0, world_size=1, **options):
    return wire_loader(loader, train=True, rank=rank, world_size=world_size, seed=3, **options)


def validation():
    return wire_loader(DataLoader(range(4), 2), train=False, rank=0, world_size=1, seed=3)


def by_feed(feed, loader, found, epochs, *, first=0, behind=0, cut=None, step=drawn):
    """Does the same as ``by_hand`` with a feed; returns its state once ``cut`` = (epoch, batches) are done."""
    for epoch in range(first, epochs):
        set_epoch(loader, epoch)
        for done, batch in enumerate(feed.starting_at(behind), behind + 1):
            found.append((epoch, batch.tolist(), step()))
            if feed.last:
                feed.finish()
            if (epoch, done) == cut:
                state = {**feed.state_dict(done), "rng": torch.get_rng_state()}
                let_go(feed, loader)
                return state
        behind = 0
        found += [(VALIDATION, batch.tolist(), step()) for batch in Feed(validation())]
    let_go(feed, loader)
    return None


def let_go(feed, loader):
    """Ends the workers, also persistent ones; the garbage collector would wait 5 s for each if their queues are gone already."""
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
    expected, after = of_the_loop(kind)
    with isolate_rng():
        torch.manual_seed(5)
        loader, found = wired(make(**LOADERS[kind])), []
        by_feed(Feed(loader), loader, found, EPOCHS)
        assert (found, drawn()) == (expected, after)


@pytest.mark.parametrize("cut", ["first", "middle", "last but one", "last"])
@pytest.mark.parametrize("kind", LOADERS)
def test_it_is_drawn_again_where_a_run_goes_on(kind, cut):
    if LOADERS[kind].get("workers") and cut not in ("middle", "last"):
        pytest.skip("two cuts are enough with processes to start")
    straight, after = of_the_loop(kind)
    batches = sum(place == 1 for place, _, _ in straight)
    place = (1, {"first": 1, "middle": batches // 2, "last but one": batches - 1, "last": batches}[cut])
    with isolate_rng():
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
        assert [*feed.starting_at(feed.load_state_dict(state))]
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


def go_on(kind, world_size, states=(), *, first=0, cut=None):
    """Resumes each rank in turn from ``states``, with the first rank's values; returns the samples by epoch, and the new states."""
    told, shares, ends = [], [], []
    for rank in range(world_size):
        torch.manual_seed(100 * len(states) + rank)

        def from_first(value, rank=rank, heard=iter(told)):  # noqa: B008 - each rank hears all of it
            if rank:
                return next(heard)
            told.append(value)
            return value

        several = {"rank": rank, "world_size": world_size, "from_first": from_first} if world_size > 1 else {}
        loader, found = wired(make(**kind), **several), []
        feed, behind = Feed(loader), 0
        if states:
            behind = feed.load_state_dict(states[min(rank, len(states) - 1)])
        if rank < len(states):
            torch.set_rng_state(states[rank]["rng"])
        ends.append(by_feed(feed, loader, found, 4, first=first, behind=behind, cut=cut, step=float))
        shares.append([(epoch, batch) for epoch, batch, _ in found if epoch != VALIDATION])
    samples = {}
    for batches in zip(*shares, strict=True):
        for indices in zip(*(batch for _, batch in batches), strict=True):
            samples.setdefault(batches[0][0], []).extend(indices)
    return samples, ends


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"own": "loader"},
        {"own": "sampler"},
        {"replacement": True},
        {"own": "loader", "workers": 1, "persistent": True},
    ],
    ids=str,
)
def test_an_order_that_one_process_began_stays_with_two_and_with_one_again(kind):
    """The run is interrupted within epochs and at an epoch's end; two ranks also resume as two ranks.

    Validations and workers consume the same random numbers as in one process.
    """
    with isolate_rng():
        straight, _ = go_on(kind, 1)
        parts, states = go_on(kind, 1, cut=(0, 3))
        for world_size, first, cut in [(2, 0, (1, 2)), (2, 1, (2, 6)), (1, 2, None)]:
            following, states = go_on(kind, world_size, states, first=first, cut=cut)
            for epoch, samples in following.items():
                parts.setdefault(epoch, []).extend(samples)
        assert parts == straight
        assert len({*map(tuple, straight.values())}) == 4


def test_ranks_that_compute_one_batch_together_draw_one_order():
    with isolate_rng():
        torch.manual_seed(1)
        straight = [batch.tolist() for batch in wired(make())]
        told = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            loader = wired(make(), from_first=lambda value: told.append(value) or told[0])
            assert [batch.tolist() for batch in Feed(loader)] == straight
        assert len(told) == 2
        assert sorted(index for batch in loader for index in batch.tolist()) == [*range(SIZE)]
        assert len(told) == 2, "a pass that one rank begins by itself"


def test_the_rule_of_several_ranks_stays_one_processes_too():
    with isolate_rng():
        expected = DistributedSampler(range(SIZE), 1, 0, seed=3)
        loader, found = wired(make(), world_size=2), []
        state = by_feed(Feed(loader), loader, found, 1, cut=(0, 3))
        loader, found = wired(make(own="loader")), []
        feed = Feed(loader)
        by_feed(feed, loader, found, 2, behind=feed.load_state_dict(state))
        assert [index for epoch, batch, _ in found for index in batch if epoch == 0][:22] == list(expected)[24:]
        expected.set_epoch(1)
        assert [index for epoch, batch, _ in found for index in batch if epoch == 1] == list(expected)


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
        batches = list(itertools.islice(feed.starting_at(behind), cut))
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


@pytest.mark.parametrize("cut", [(0, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("began", [habits.NATIVE, habits.LIGHTNING], ids=["natively", "for Lightning"])
def test_a_resumed_run_keeps_the_rule_of_the_run_that_it_goes_on_from(began, cut, monkeypatch):
    kind = {"own": "loader", "batch": 12}
    with isolate_rng():
        monkeypatch.setattr(habits, "_present", began)
        loader, straight = wired(make(**kind)), []
        by_feed(Feed(loader), loader, straight, EPOCHS, step=float)
        loader, found = wired(make(**kind)), []
        state = by_feed(Feed(loader), loader, found, EPOCHS, cut=cut, step=float)
        monkeypatch.setattr(habits, "_present", habits.NATIVE if began is habits.LIGHTNING else habits.LIGHTNING)
        loader = wired(make(**kind))
        feed = Feed(loader)
        behind = feed.load_state_dict(state)
        by_feed(feed, loader, found, EPOCHS, first=cut[0], behind=behind, step=float)
        assert found == straight
        own = by_feed(Feed(wired(make(**kind))), loader, [], EPOCHS, cut=(0, 1), step=float)
        assert own["orders"][0]["reads_to_end"] != state["orders"][0]["reads_to_end"]


def test_a_file_that_says_no_rule_has_the_native_one(monkeypatch):
    kind = {"own": "loader", "batch": 23}
    with isolate_rng():
        loader = wired(make(**kind))
        state = by_feed(Feed(loader), loader, [], EPOCHS, cut=(0, 2), step=float)
        del state["orders"][0]["reads_to_end"]
        monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
        loader = wired(make(**kind))
        assert not loader.sampler.order.reads_to_end
        Feed(loader).load_state_dict(state)
        assert loader.sampler.order.reads_to_end


@pytest.mark.parametrize(
    "kind",
    ["whole batches", "the sampler's generator", "replacement and a generator", "fewer samples", "more samples"],
)
def test_for_lightning_a_pass_without_workers_ends_at_its_last_batch(kind, monkeypatch):
    """As a loop that does not ask for what follows the last batch."""
    options = LOADERS[kind]
    loader, expected = make(**options), []
    for _ in range(EPOCHS):
        batches = iter(loader)
        expected += [next(batches).tolist() for _ in range(len(loader))]
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
    loader, found = wired(make(**options)), []
    with isolate_rng():
        by_feed(Feed(loader), loader, found, EPOCHS, step=float)
    assert [batch for place, batch, _ in found if place != VALIDATION] == expected
