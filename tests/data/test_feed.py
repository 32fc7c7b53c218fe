"""The feed: its batches, its ``last``, when errors surface, and that workers end."""

from __future__ import annotations

import gc
import math
import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fabricamp.data import CombinedLoader, Feed, move_to_device, wire_loader
from fabricamp.errors import ConfigError


class Numbers(Dataset):
    def __init__(self, size, fails_at=None):
        self.size, self.fails_at = size, fails_at

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.fails_at:
            message = f"sample {index} is broken"
            raise ValueError(message)
        return index


class Stream(IterableDataset):
    """An iterable dataset; ``announced`` is its ``len()``."""

    def __init__(self, size, announced=None):
        self.size = size
        if announced is not None:
            self.announced = announced

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(self.size) if worker is None else range(worker.id, self.size, worker.num_workers))


class SizedStream(Stream):
    def __len__(self):
        return self.announced


class Generated:
    """A loader without a length that can be iterated only once."""

    def __init__(self, size, fails_at=None):
        self.size, self.fails_at = size, fails_at
        self.drawn = 0

    def __iter__(self):
        for index in range(self.size):
            self.drawn = index + 1
            if index == self.fails_at:
                message = f"batch {index} is broken"
                raise ValueError(message)
            yield index


class Kept:
    """Counts its living instances."""

    alive = 0

    def __init__(self):
        Kept.alive += 1

    def __del__(self):
        Kept.alive -= 1


def seen(feed):
    return [(batch, feed.last) for batch in feed]


def flagged(batches):
    batches = list(batches)
    return [(batch, index == len(batches) - 1) for index, batch in enumerate(batches)]


@settings(deadline=None)  # the machine may be busy
@given(
    size=st.integers(1, 8),
    limit=st.one_of(st.integers(0, 10), st.just(math.inf)),
    kind=st.sampled_from([list, Generated, "loader", "stream"]),
)
def test_batches_and_last(size, limit, kind):
    loaders = {
        list: list(range(size)),
        Generated: Generated(size),
        "loader": DataLoader(Numbers(size), batch_size=None),
        "stream": DataLoader(Stream(size), batch_size=None),
    }
    feed = Feed(loaders[kind], limit=limit, prepare=str)
    expected = flagged([str(index) for index in range(size)[: int(min(limit, size))]])
    for _ in range(2):
        assert [(str(batch), last) for batch, last in seen(feed)] == expected
        assert not feed.last


@pytest.fixture
def workers_end():
    """Returns a function that waits until all processes started by the test have ended, and fails if one does not end."""
    before = set(multiprocessing.active_children())

    def wait():
        for process in set(multiprocessing.active_children()) - before:
            process.join(60)
            assert not process.is_alive()

    return wait


@pytest.mark.parametrize("wired", [False, True])
def test_workers(wired, workers_end):
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2)
    if wired:
        loader = wire_loader(loader, train=True, rank=0, world_size=1, seed=0)
    whole = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    for limit, count in ((math.inf, 5), (2, 2), (5, 5), (math.inf, 5)):
        batches = [(batch.tolist(), last) for batch, last in seen(Feed(loader, limit=limit))]
        assert batches == flagged(whole[:count])
    del loader
    workers_end()


def test_streams_with_workers_whose_length_is_an_estimate():
    shorter = DataLoader(SizedStream(5, announced=6), batch_size=None, num_workers=2)
    assert sorted(batch for batch, _ in seen(Feed(shorter))) == [0, 1, 2, 3, 4]
    assert [last for _, last in seen(Feed(shorter))] == [False] * 4 + [True]
    assert [last for _, last in seen(Feed(shorter, limit=3))] == [False, False, True]
    assert [last for _, last in seen(Feed(CombinedLoader([shorter])))] == [False] * 4 + [True]


def test_nothing_is_read_ahead_of_a_known_length():
    class Loader(Generated):
        def __len__(self):
            return self.size

    for loader, ahead in ((Loader(4), 0), (Generated(4), 1)):
        drawn = [loader.drawn - 1 - batch for batch in Feed(loader)]
        assert drawn == [ahead] * 3 + [0]
    loader = Generated(100)
    list(Feed(loader, limit=3))
    assert loader.drawn == 3


def test_batches_are_prepared_when_they_are_handed_over():
    for loader in ([0, 1, 2], Generated(3)):
        prepared = []
        feed = Feed(
            loader, prepare=lambda batch, to=prepared: to.append(batch) or batch + 10, finish=lambda batch: -batch
        )
        counts = [(batch, len(prepared)) for batch in feed]
        assert counts == [(-10, 1), (-11, 2), (-12, 3)]


@pytest.mark.parametrize(
    "loader",
    [
        Generated(5, fails_at=3),
        DataLoader(Numbers(5, fails_at=3), batch_size=None),
        DataLoader(Numbers(5, fails_at=3), batch_size=None, num_workers=2),
    ],
    ids=["generated", "loader", "workers"],
)
def test_an_error_surfaces_at_its_batch(loader):
    feed = Feed(loader)
    for _ in range(2):
        batches = iter(feed)
        assert [(int(next(batches)), feed.last) for _ in range(3)] == [(0, False), (1, False), (2, False)]
        with pytest.raises(ValueError, match="is broken"):
            next(batches)


def test_closing_early_ends_the_workers(workers_end):
    loader = DataLoader(Numbers(100), num_workers=2)
    feed = Feed(loader)
    try:
        for batch in feed:
            assert batch.item() == 0
            message = "the step failed"
            raise RuntimeError(message)
    except RuntimeError:
        feed.close()
    workers_end()
    assert not feed.last
    feed.close()


def test_an_error_in_preparing_ends_the_workers_though_its_traceback_is_kept(workers_end):
    def fail(batch):
        message = "cannot prepare"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError) as kept:
        list(Feed(DataLoader(Numbers(100), num_workers=2), prepare=fail))
    assert kept.tb is not None
    workers_end()


def test_a_loader_that_ends_before_its_length_is_refused():
    class Short:
        def __len__(self):
            return 5

        def __iter__(self):
            return iter([1, 2])

    with pytest.raises(ConfigError, match=r"Short announced 5 batches by its len.* but ended after 2"):
        list(Feed(Short()))
    assert seen(Feed(Short(), limit=2)) == [(1, False), (2, True)]


def test_a_used_up_iterator_is_refused():
    feed = Feed(iter([1, 2]))
    assert seen(feed) == [(1, False), (2, True)]
    with pytest.raises(ConfigError, match="list_iterator that is used up"):
        list(feed)


def test_a_share_of_nothing_yields_nothing():
    loader = wire_loader(DataLoader(Numbers(1)), train=False, rank=1, world_size=2, seed=0)
    assert list(Feed(loader)) == []


def test_a_resumed_pass_is_shorter():
    loader = wire_loader(DataLoader(Numbers(10), batch_size=2), train=True, rank=0, world_size=1, seed=0)
    loader.sampler.start = 6
    assert [(batch.tolist(), last) for batch, last in seen(Feed(loader))] == [([6, 7], False), ([8, 9], True)]
    assert len(seen(Feed(loader))) == 5


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("kind", [Generated, list])
def test_batches_are_prepared_ahead_and_finished_when_they_are_due(kind, ahead):
    order = []
    loader = Generated(4) if kind is Generated else [0, 1, 2, 3]
    feed = Feed(loader, prepare=lambda one: order.append(one) or one, finish=lambda one: -one, prefetch=ahead)
    seen = [(batch, feed.last, len(order)) for batch in feed]
    assert seen == [(-index, index == 3, min(index + 1 + ahead, 4)) for index in range(4)]
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_an_error_in_preparing_ahead_surfaces_at_its_batch(ahead):
    def prepare(batch):
        if batch == 3:
            message = "batch 3 is broken"
            raise ValueError(message)
        return batch

    for loader in (range(5), Generated(5)):
        feed = Feed(loader, prepare=prepare, prefetch=ahead)
        batches = iter(feed)
        assert [(next(batches), feed.last) for _ in range(3)] == [(0, False), (1, False), (2, False)]
        with pytest.raises(ValueError, match="3 is broken"):
            next(batches)


def test_nothing_that_was_read_ahead_is_kept_behind_a_pass():
    feed = Feed([0, 1, 2], prepare=lambda _: Kept(), prefetch=2)
    assert next(iter(feed)) is not None
    assert Kept.alive == 3
    feed.close()
    gc.collect()
    assert Kept.alive == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestPrefetch:
    """Batches are prefetched on a side stream, without waits of the host."""

    device = torch.device("cuda", 0) if torch.cuda.is_available() else None

    def move(self, batch):
        return move_to_device(batch, self.device)

    def test_same_batches_and_one_is_read_ahead(self):
        for loader in (Generated(4), [0, 1, 2, 3]):
            assert seen(Feed(loader, device=self.device, prefetch=1)) == flagged(range(4))
        loader = Generated(4)
        ahead = [loader.drawn - 1 - batch for batch in Feed(loader, device=self.device, prefetch=1)]
        assert ahead == [1, 1, 1, 0]

    def test_an_error_surfaces_at_its_batch(self):
        batches = iter(Feed(Generated(5, fails_at=3), device=self.device, prefetch=1))
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="is broken"):
            next(batches)

    def test_values_are_right_under_reused_memory_and_the_host_never_waits(self):
        data = torch.arange(64.0).repeat_interleave(1 << 16).view(64, -1)
        loader = DataLoader(data, batch_size=1, pin_memory=True)
        prepare, finish = lambda batch: {"x": self.move(batch) + 1}, lambda batch: batch["x"] * 2
        feed = Feed(loader, prepare=prepare, finish=finish, device=self.device, prefetch=1)
        results = []
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in feed:
                torch.cuda._sleep(2_000_000)
                results.append(batch.amax() + batch.amin())
                del batch
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.stack(results).tolist() == [4.0 * (index + 1) for index in range(64)]

    @pytest.mark.parametrize("ahead", [1, 2])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_small_batches_go_the_way_of_the_step(self, ahead, pinned):
        """Values are right although memory is reused and a slow step edits in place; no wait of the host; on the step's stream."""
        streams = []

        def prepare(batch):
            streams.append(torch.cuda.current_stream())
            return self.move(batch)

        loader = [[torch.full((256,), float(index)), torch.tensor([index])] for index in range(48)]
        if pinned:
            loader = [[one.pin_memory() for one in batch] for batch in loader]
        feed, results = Feed(loader, prepare=prepare, device=self.device, prefetch=ahead), []
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                for values, label in feed:
                    torch.cuda._sleep(2_000_000)
                    values.add_(1)
                    results.append(values.amax() + values.amin() + 0 * label)
                    del values, label
                assert set(streams) == {torch.cuda.current_stream()}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.cat(results).tolist() == [2.0 * (index + 1) for index in range(48)]

    def test_a_small_batch_that_is_taken_on_another_stream_is_there(self):
        def prepare(batch):
            torch.cuda._sleep(20_000_000)
            return self.move(batch)

        batches = iter(
            Feed(
                [torch.full((8,), float(index)) for index in range(4)], prepare=prepare, prefetch=1, device=self.device
            )
        )
        results = []
        for stream in [torch.cuda.Stream(self.device) for _ in range(4)]:
            with torch.cuda.stream(stream):
                results.append(next(batches) * 2)
        torch.cuda.synchronize()
        assert [one.tolist() for one in results] == [[2.0 * index] * 8 for index in range(4)]

    def test_the_step_waits_for_a_slow_copy(self):
        def prepare(batch):
            torch.cuda._sleep(200_000_000)
            return self.move(batch) + 1

        loader = DataLoader(torch.arange(4.0), batch_size=1, pin_memory=True)
        results = [batch * 2 for batch in Feed(loader, prepare=prepare, device=self.device, prefetch=1)]
        assert torch.cat(results).tolist() == [2, 4, 6, 8]

    def test_the_copy_does_not_wait_for_the_step(self):
        copied = []

        def prepare(batch):
            moved = self.move(batch)
            copied.append(torch.cuda.current_stream().record_event())
            return moved

        loader = DataLoader(torch.zeros(4, 1 << 20), batch_size=1, pin_memory=True)
        for index, _ in enumerate(Feed(loader, prepare=prepare, device=self.device, prefetch=1)):
            if index == 1:
                torch.cuda._sleep(3_000_000_000)
                busy = torch.cuda.current_stream().record_event()
            if index == 2:
                copied[3].synchronize()
                assert not busy.query(), "batch 3 was on the device while step 1 still ran"
        torch.cuda.synchronize()

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_what_a_hook_hides_is_right_under_reused_memory_shapes_and_edits(self, ahead):
        """Tensors are hidden in objects, change their size with each batch, and are edited in place by a slow step."""

        class Hidden:
            def __init__(self, value):
                self.get = lambda: value

        sizes = [1 << (16 + index % 3) for index in range(48)]
        loader = [torch.full((size,), float(index)).pin_memory() for index, size in enumerate(sizes)]
        feed = Feed(
            loader,
            prepare=lambda batch: Hidden(self.move(batch) + 1),
            device=self.device,
            prefetch=ahead,
            hooked=True,
        )
        results = []
        for batch in feed:
            values = batch.get()
            torch.cuda._sleep(3_000_000)
            values += 1
            results.append(values.amax() + values.amin())
            del batch, values
        assert torch.stack(results).tolist() == [2.0 * (index + 2) for index in range(48)]

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_batches_that_a_loader_makes_on_the_gpu_are_read_when_they_are_there(self, ahead):
        def made():
            for index in range(32):
                torch.cuda._sleep(3_000_000)
                yield torch.full((1 << 16,), float(index), device=self.device)

        results = []
        for batch in Feed(made(), prepare=lambda one: one.half(), device=self.device, prefetch=ahead):
            junk = torch.full((1 << 16,), -1.0, device=self.device)  # reuses the batch's memory if that was freed
            results.append(batch.amax() + batch.amin() + 0 * junk[0])
            del batch
        assert torch.stack(results).tolist() == [2.0 * index for index in range(32)]


class Countdown:
    """A stream that keeps its position and cannot be started again."""

    def __init__(self, left):
        self.left = left

    def __iter__(self):
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "sequential"])
def test_a_pass_without_a_batch_over_streams_that_are_at_their_end_can_be_saved(mode):
    feed = Feed(CombinedLoader([Countdown(2), Countdown(3)], mode))
    assert len(list(feed)) > 1
    assert list(feed) == []
    state = feed.state_dict(0)
    assert "at_limit" not in state
    resumed = Feed(CombinedLoader([Countdown(0), Countdown(0)], mode))
    resumed.load_state_dict(state)
    assert list(resumed) == []


class Restarts:
    """A loader that starts anew at each ``iter()``, which returns the loader itself; ``begun`` counts these calls."""

    def __init__(self, size=6):
        self.size, self.begun = size, 0

    def __iter__(self):
        self.begun += 1
        self.at = 0
        return self

    def __next__(self):
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return self.at


class SizedRestarts(Restarts):
    def __len__(self):
        return self.size


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("reach", [0, 1], ids=["evaluation", "training"])
@pytest.mark.parametrize("limit", [math.inf, 4])
@pytest.mark.parametrize("kind", [Restarts, SizedRestarts])
def test_a_loader_is_asked_for_an_iterator_once_a_pass(kind, limit, reach, behind):
    own = kind()
    feed = Feed(own, limit=limit, reach=reach)
    expected = [1, 2, 3, 4, 5, 6][: min(limit, 6)]
    for number in (1, 2):
        assert [*feed.starting_at(behind)] == expected[behind:]
        assert own.begun == number


@pytest.mark.parametrize("kind", [Restarts, SizedRestarts])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "sequential"])
def test_combined_loaders_are_asked_so_too(kind, mode):
    members = [kind(3), kind(3)]
    feed = Feed(CombinedLoader(members, mode))
    for number in (1, 2):
        assert len([*feed]) == (6 if mode == "sequential" else 3)
        assert [one.begun for one in members] == [number, number]


@pytest.mark.parametrize("kind", [Restarts, SizedRestarts])
def test_a_resumed_pass_asks_once_too(kind):
    first = Feed(kind())
    batches = iter(first)
    read = [next(batches), next(batches)]
    own = kind()
    again = Feed(own)
    behind = again.load_state_dict(first.state_dict(2))
    assert [*read, *again.starting_at(behind)] == [1, 2, 3, 4, 5, 6]
    assert own.begun == 1
