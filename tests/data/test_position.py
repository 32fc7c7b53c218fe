"""Positions in loaders: another process resumes a pass at any position, without reading the samples before it if possible."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from fabricamp.data import CombinedLoader, Feed, release_workers, set_epoch, wire_loader
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.rng import isolate_rng


class Numbers(Dataset):
    """Returns its indices; records which were read."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Noise(Numbers):
    """Returns random numbers of Python, NumPy and torch."""

    def __getitem__(self, index):
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def wired(loader, *, rank=0, world_size=1, epoch=0, **options):
    torch.manual_seed(4)
    loader = wire_loader(loader, train=True, rank=rank, world_size=world_size, seed=3, **options)
    set_epoch(loader, epoch)
    return loader


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, list) else batch


def taken(feed, count):
    batches = iter(feed)
    return [plain(next(batches)) for _ in range(count)]


def resumed(make, count):
    """Returns the batches of a pass over a new loader that resumes after ``count`` batches of another loader."""
    first = Feed(make())
    taken(first, count)
    state, rng = first.state_dict(count), torch.get_rng_state()
    first.close()
    feed = Feed(make())
    torch.set_rng_state(rng)
    behind = feed.load_state_dict(state)
    return behind, [plain(batch) for batch in feed.starting_at(behind)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_workers_that_stay_draw_no_other_order_where_it_is_read_past(epoch):
    """Persistent workers draw a seed only in the first pass; a resumed pass consumes the same random numbers again."""

    def passes(cut, state=None):
        loader = DataLoader(
            Numbers(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 9), num_workers=1, persistent_workers=True
        )
        feed, found = Feed(wire_loader(loader, train=True, rank=0, world_size=1, seed=3)), []
        behind = 0
        if state is not None:
            torch.set_rng_state(state["rng"])
            behind = feed.load_state_dict(state)
        for number in range(epoch if state else 0, 3):
            for done, batch in enumerate(feed.starting_at(behind), behind + 1):
                found.append(plain(batch))
                if (number, done) == cut:
                    state = {**feed.state_dict(done), "rng": torch.get_rng_state()}
                    feed.close()
                    release_workers(loader)
                    return found, state
            behind = 0
        release_workers(loader)
        return found, torch.get_rng_state()

    with isolate_rng():
        torch.manual_seed(5)
        straight, after = passes(None)
        torch.manual_seed(5)
        begun, state = passes((epoch, 2))
        torch.manual_seed(9)
        following, end = passes(None, state)
    assert begun + following == straight
    assert torch.equal(end, after)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size", "sequential"]),
    share=st.floats(0, 1),
    own=st.booleans(),
)
def test_several_loaders_go_on_from_anywhere(sizes, mode, share, own):
    def make():
        members = [DataLoader(Numbers(size), 2, shuffle=True) for size in sizes]
        if own:  # this sampler's position is only reached by reading the batches before it
            members[0] = [[-1, index] for index in range(sizes[0])]
        return wired(CombinedLoader(dict(enumerate(members)), mode), epoch=2)

    straight = [plain(batch) for batch in Feed(make())]
    count = max(1, int(share * (len(straight) - 1)))
    if count < len(straight):
        assert resumed(make, count) == (count, straight[count:])


def test_several_loaders_are_not_read_past():
    datasets = []

    def make():
        datasets.append((Numbers(40), Numbers(6)))
        members = [DataLoader(dataset, 2, shuffle=True) for dataset in datasets[-1]]
        return wired(CombinedLoader(members, "max_size_cycle"))

    behind, batches = resumed(make, 17)
    assert (behind, len(batches)) == (17, 3)
    assert [len(dataset.read) for dataset in datasets[1]] == [6, 6]


@pytest.mark.parametrize(("batch", "ranks", "behind"), [(2, 1, 6), (3, 2, 2), (4, 1, 3), (5, 1, 2), (12, 2, 0)])
def test_other_batch_sizes_and_numbers_of_ranks(batch, ranks, behind):
    """After three batches of two samples on two ranks, the same samples follow, and the epoch ends after the same sample."""
    theirs = DistributedSampler(range(40), 1, 0, seed=3)
    first = Feed(wired(DataLoader(Numbers(40), 2, shuffle=True), world_size=2))
    taken(first, 3)
    state = first.state_dict(3)
    order = list(theirs)
    shares = []
    for rank in range(ranks):
        loader = wired(DataLoader(Numbers(40), batch, shuffle=True), rank=rank, world_size=ranks)
        feed = Feed(loader)
        assert feed.load_state_dict(state) == behind
        batches = [one.tolist() for one in feed.starting_at(behind)]
        assert behind + len(batches) == len(loader)
        shares.append([index for one in batches for index in one])
    assert [index for places in zip(*shares, strict=True) for index in places][:28] == order[12:]


def test_between_two_passes_the_next_one_begins():
    def make():
        return wired(DataLoader(Numbers(6), 2))

    feed = Feed(make())
    list(feed)
    again = Feed(make())
    assert again.load_state_dict(feed.state_dict(0)) == 0
    assert len(list(again.starting_at(0))) == 3


def test_behind_the_last_batch_there_is_nothing_left():
    feed = Feed(wired(DataLoader(Numbers(6), 2)))
    batches = feed.starting_at(0)
    for _ in range(3):
        next(batches)
    state = feed.state_dict(3)
    again = Feed(wired(DataLoader(Numbers(6), 2)))
    assert again.load_state_dict(state) == 3
    assert again.last
    assert list(again.starting_at(3)) == []
    assert len(list(again.starting_at(0))) == 3


def test_a_state_of_other_loaders_is_refused():
    feed = Feed(wired(CombinedLoader([[1, 2], [3, 4]])))
    taken(feed, 1)
    with pytest.raises(CheckpointError, match="2 loaders, and this run has 1"):
        Feed([1, 2]).load_state_dict(feed.state_dict(1))


def test_a_stream_in_workers_is_read_past():
    """The positions of the stream's copies in workers are unknown, but reading from the beginning gives the same random numbers."""

    class Draws(IterableDataset):
        def __iter__(self):
            return iter([torch.rand(()) for _ in range(6)])

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError

    def make():
        return DataLoader(Draws(), 1, num_workers=1)

    with isolate_rng():
        torch.manual_seed(1)
        straight = [plain(batch) for batch in Feed(make())]
        torch.manual_seed(1)
        feed = Feed(make())
        taken(feed, 2)
        state = feed.state_dict(2)
        feed.close()
        torch.manual_seed(9)
        before = torch.get_rng_state()
        again = Feed(make())
        assert again.read_past == ["DataLoader"]
        assert [plain(batch) for batch in again.starting_at(again.load_state_dict(state))] == straight[2:]
        assert torch.equal(torch.get_rng_state(), before), "a resumed pass draws what was drawn before, not anew"


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_has_its_own_random_numbers(workers):
    def read(epoch, **options):
        loader = DataLoader(Noise(6), 3, num_workers=workers, collate_fn=list)
        return [sample for batch in wired(loader, epoch=epoch, per_sample_seed=True, **options) for sample in batch]

    with isolate_rng():
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        first = read(1)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
        assert workers or torch.equal(torch.get_rng_state(), before[0]) is False, "torch draws a seed for each pass"
        torch.manual_seed(5)
        random.seed(5)
        assert read(1) == first
        assert read(2) != first
        # The values of a sample do not depend on the rank that reads it.
        assert read(1, rank=1, world_size=2) == first[1::2]
    assert len({tuple(sample) for sample in first}) == 6


def test_workers_stay_where_each_sample_has_its_own_random_numbers():
    class Told(Noise):
        def set_epoch(self, epoch):
            pass

    def wired_anew(dataset, **options):
        return wired(DataLoader(dataset, 3, num_workers=1, **options), per_sample_seed=True)

    def read(**changes):
        loader = wired_anew(Noise(6))
        vars(loader).update(changes)  # torch forbids setting this attribute
        feed, found, workers = Feed(loader), [], set()
        for epoch in range(3):
            set_epoch(loader, epoch)
            found.append([plain(batch) for batch in feed.starting_at(0)])
            workers |= {one.pid for one in loader._iterator._workers} if loader.persistent_workers else {epoch}
        release_workers(loader)
        return found, torch.get_rng_state(), len(workers)

    with isolate_rng():
        (kept, state, processes), (anew, other_state, _) = read(), read(persistent_workers=False)
    assert processes == 1
    assert kept == anew
    assert torch.equal(state, other_state)
    assert not any(one.persistent_workers for one in (wired_anew(Told(6)), wired_anew(Noise(6), collate_fn=list)))
    assert not wired(DataLoader(Noise(6), 3, num_workers=1)).persistent_workers


def test_seeds_of_samples_reach_the_dataset_behind():
    dataset = Numbers(4)
    dataset.classes = ["a", "b"]
    loader = wired(DataLoader(dataset, 2, shuffle=True), per_sample_seed=True)
    assert loader.dataset.classes == ["a", "b"]
    assert loader.dataset.dataset is dataset
    assert sorted(index for batch in loader for index in batch.tolist()) == [0, 1, 2, 3]
    with pytest.raises(AttributeError):
        loader.dataset.nothing  # noqa: B018


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Numbers(4), sampler=[2, 1])])
def test_seeds_of_samples_need_indices(loader):
    with pytest.raises(ConfigError, match="per_sample_seed=True seeds the samples of a dataset with indices"):
        wired(loader, per_sample_seed=True)


class GoesOn(IterableDataset):
    """A stream of numbers that continues from pass to pass, shuffled by a buffer."""

    def __init__(self):
        self.count, self.buffer = 0, [-1, -2, -3]

    def __iter__(self):
        while True:
            self.count += 1
            place = int(torch.randint(3, ()))
            drawn, self.buffer[place] = self.buffer[place], self.count
            yield drawn

    def state_dict(self):
        return {"count": self.count, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.count, self.buffer = state["count"], list(state["buffer"])


class BeginsAnew(GoesOn):
    """A stream that begins each pass with the first number, unless the pass is resumed."""

    starts = 0

    def __iter__(self):
        self.count, self.starts = self.starts, 0
        return super().__iter__()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.starts = state["count"]


STREAMS = {
    "goes on": GoesOn,
    "begins anew": BeginsAnew,
    "in a DataLoader": lambda: DataLoader(GoesOn(), 2),
    "combined": lambda: CombinedLoader([GoesOn(), BeginsAnew()], "min_size"),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_passes_over_a_stream_that_a_number_ends(kind, cut):
    """A run that resumes after a limited pass continues the streams where the next pass would; two passes of four follow."""

    def passes(feed, first):
        return [[plain(batch) for batch in feed.starting_at(count)] for count in (first, 0)]

    with isolate_rng():
        torch.manual_seed(2)
        feed = Feed(STREAMS[kind](), limit=4)
        list(feed)
        if cut:  # within the second pass, or after its last batch
            for done, _ in enumerate(feed, 1):
                if done == cut:
                    state, rng = feed.state_dict(cut), torch.get_rng_state()
        else:
            state, rng = feed.state_dict(0), torch.get_rng_state()
        straight = Feed(STREAMS[kind](), limit=4)
        torch.manual_seed(2)
        before = [[plain(batch) for batch in straight] for _ in range(2)]
        behind = [[plain(batch) for batch in straight] for _ in range(2)]
        expected = [before[1], behind[0]] if cut == 0 else [before[1][cut:], behind[0]]
        again = Feed(STREAMS[kind](), limit=4)
        first = again.load_state_dict(state)
        torch.set_rng_state(rng)
        assert passes(again, first) == expected


class Shuffles(IterableDataset):
    """Yields ``size`` numbers in an order drawn by its own generator for each pass; an unfinished pass is continued."""

    def __init__(self, size):
        self.size, self.generator, self.left = size, np.random.default_rng(5), []

    def __iter__(self):
        self.left = self.left or self.generator.permutation(self.size).tolist()
        while self.left:
            yield self.left.pop()

    def state_dict(self):
        return {"generator": self.generator.bit_generator.state, "left": self.left}

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state["generator"]
        self.left = list(state["left"])


class Forgets:
    """Yields batches in order; an unfinished pass starts again, unless another process resumes it."""

    def __init__(self, size):
        self.size, self.done, self.starts = size, 0, 0

    def __iter__(self):
        first, self.starts = self.starts, 0
        for number in range(first + 1, self.size + 1):
            self.done = number
            yield number

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.starts = state["done"]


def shuffled(size):
    return DataLoader(Numbers(size), 2, shuffle=True)


def drawing(size):
    """Returns a loader with an unknown order of samples; a resume point in it is reached only by reading the batches before it."""
    return DataLoader(Numbers(size), 2, sampler=WeightedRandomSampler([1.0] * size, size))


def stream(size):
    return DataLoader(Shuffles(size), 2)


SEVERAL = {
    "one that is read past, first": lambda mode: CombinedLoader([drawing(8), shuffled(4)], mode),
    "one that is read past, last": lambda mode: CombinedLoader([shuffled(8), drawing(4)], mode),
    "a longer stream": lambda mode: CombinedLoader([stream(8), shuffled(4)], mode),
    "a shorter stream": lambda mode: CombinedLoader([shuffled(8), stream(4)], mode),
    "streams": lambda mode: CombinedLoader([stream(8), stream(6), drawing(4)], mode),
    "one that begins anew": lambda mode: CombinedLoader([stream(8), Forgets(2)], mode),
    "a stream alone": lambda mode: stream(8),
}
MODES = ["max_size_cycle", "max_size", "min_size", "sequential"]


@pytest.mark.parametrize(
    ("kind", "mode", "limit"),
    [
        *((kind, mode, limit) for kind in list(SEVERAL)[:-2] for mode in MODES for limit in (math.inf, 3)),
        *(("one that begins anew", mode, math.inf) for mode in MODES[:3]),
        *((kind, "max_size", 10) for kind in list(SEVERAL)[2:]),  # a limit beyond the end of all of them
    ],
)
def test_loaders_of_several_kinds_go_on_from_anywhere(kind, mode, limit):
    """An uninterrupted run makes three passes; a run that resumes after any batch, or between passes, yields the rest."""
    with isolate_rng():
        straight, cuts = [], []
        feed = Feed(wired(SEVERAL[kind](mode)), limit=limit)
        for _ in range(3):
            for done, batch in enumerate(feed, 1):
                straight.append(plain(batch))
                cuts.append((len(straight), copy.deepcopy(feed.state_dict(done)), torch.get_rng_state()))
            cuts.append((len(straight), copy.deepcopy(feed.state_dict(0)), torch.get_rng_state()))
        for count, state, rng in cuts:
            again = Feed(wired(SEVERAL[kind](mode)), limit=limit)
            behind = again.load_state_dict(state)
            torch.set_rng_state(rng)
            found = [plain(batch) for batch in again.starting_at(behind)]
            found += [plain(batch) for _ in range(3) for batch in again if count + len(found) < len(straight)]
            assert found[: len(straight) - count] == straight[count:], count


@pytest.mark.parametrize(
    "make",
    [
        lambda: shuffled(8),
        lambda: stream(8),
        lambda: CombinedLoader([shuffled(8), shuffled(6)], "max_size"),
        lambda: CombinedLoader([shuffled(8), stream(4)]),
        lambda: CombinedLoader([shuffled(4), DataLoader(Numbers(4), 2)], "sequential"),
    ],
    ids=["one loader", "a stream", "two loaders", "a stream beside a loader", "one after the other"],
)
def test_a_batch_that_is_out_and_not_done_is_given_again(make):
    """For example a step raises, and then the run is saved."""
    with isolate_rng():
        feed, straight, states = Feed(wired(make())), [], []
        for done, batch in enumerate(feed):
            straight.append(plain(batch))
            states.append(copy.deepcopy(feed.state_dict(done)))
        for done, state in enumerate(states[1:], 1):
            again = Feed(wired(make()))
            assert again.load_state_dict(state) == done
            assert [plain(batch) for batch in again.starting_at(done)] == straight[done:]
