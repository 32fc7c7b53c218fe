"""wire_loader: which loaders are rebuilt, their kept options, messages, and the workers' own random numbers."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabricamp._utils.say_once import say_once
from fabricamp.data import CombinedLoader, EvalSampler, TrainSampler, release_workers, set_epoch, wire_loader
from fabricamp.errors import ConfigError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class Draws(Dataset):
    """Returns random numbers of the worker's generators."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import numpy as np

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def keep(samples):
    return samples


def wire(loader, *, train=True, rank=0, world_size=1, seed=5, **options):
    return wire_loader(loader, train=train, rank=rank, world_size=world_size, seed=seed, **options)


@pytest.fixture(autouse=True)
def _said_anew():
    say_once.cache_clear()


def test_shuffled_loader_gets_torchs_distributed_order():
    loader = DataLoader(range(11), batch_size=2, shuffle=True, collate_fn=keep)
    for rank in range(3):
        wired = wire(loader, rank=rank, world_size=3)
        theirs = DistributedSampler(range(11), num_replicas=3, rank=rank, seed=5)
        for epoch in range(2):
            set_epoch(wired, epoch)
            theirs.set_epoch(epoch)
            assert list(wired) == list(BatchSampler(theirs, 2, drop_last=False))


def test_unshuffled_loader_stays_in_order():
    assert list(wire(DataLoader(range(5), batch_size=2, collate_fn=keep))) == [[0, 1], [2, 3], [4]]


def test_other_options_are_kept():
    options = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": keep,
        "pin_memory": False,
        "drop_last": True,
        "timeout": 7.0,
        "worker_init_fn": keep,
        "prefetch_factor": 4,
        "multiprocessing_context": "fork",
        "in_order": False,
        "generator": torch.Generator(),
    }
    loader = DataLoader(range(20), shuffle=True, **options)
    for train in (True, False):
        wired = wire(loader, train=train, rank=1, world_size=2)
        assert wired is not loader
        for name in set(options) - {"multiprocessing_context"}:
            assert getattr(wired, name) == getattr(loader, name), name
        assert wired.multiprocessing_context.get_start_method() == "fork"
        assert not wired.persistent_workers
        assert wired.dataset is loader.dataset
        assert isinstance(wired.sampler, TrainSampler if train else EvalSampler)


def test_loader_without_batches_of_its_own_is_rebuilt_too():
    wired = wire(DataLoader(range(4), batch_size=None), rank=1, world_size=2, train=False)
    assert list(wired) == [1, 3]


def test_plain_batch_sampler_is_the_default_batching():
    loader = DataLoader(
        range(6), batch_sampler=BatchSampler(RandomSampler(range(6)), 4, drop_last=True), collate_fn=keep
    )
    wired = wire(loader)
    assert isinstance(wired.sampler, TrainSampler)
    assert wired.sampler.order.rule == "drawn"
    assert wired.batch_size == 4
    assert wired.drop_last


class OwnLoader(DataLoader):
    pass


class OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(2)],
        DataLoader(Stream()),
        OwnLoader(range(4)),
        DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
        DataLoader(range(4), sampler=SubsetRandomSampler([0, 1])),
        DataLoader(range(4), sampler=RandomSampler(range(3))),
        DataLoader(range(4), sampler=SequentialSampler(range(2))),
        DataLoader(range(4), batch_sampler=OwnBatchSampler(SequentialSampler(range(4)), 2, drop_last=False)),
        DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]),
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_anything_else_is_used_as_it_is_and_said_once(loader, caplog):
    with caplog.at_level(logging.WARNING):
        assert wire(loader) is loader
        assert not caplog.records
        assert wire(loader, rank=1, world_size=2) is loader
        assert wire(loader, world_size=2, distributed_sampler=False) is loader
        assert not caplog.records
        assert wire(loader, world_size=2) is loader
        assert wire(loader, world_size=2) is loader
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{type(loader).__name__} is used as it is"]


def test_a_stream_that_ranks_evaluate_is_told_of_where_training_was_told_of_too(caplog):
    with caplog.at_level(logging.WARNING):
        for train in (True, False, False):
            wire(DataLoader(Stream()), world_size=2, train=train)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "DataLoader is used as it is",
        "Stream is evaluated as it is",
    ]
    assert "DataLoader(Sharded(Stream(...)))" in caplog.records[1].message


def test_users_distributed_sampler_is_kept_without_a_word(caplog):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    plain = DataLoader(range(8), sampler=sampler)
    batched = DataLoader(range(8), batch_sampler=OwnBatchSampler(sampler, 2, drop_last=False))
    for loader in (plain, batched):
        assert wire(loader, world_size=2) is loader
        set_epoch(loader, 3)
        assert sampler.epoch == 3
        sampler.set_epoch(0)
    assert not caplog.records


def test_without_distributed_sampler_every_rank_reads_everything():
    loader = DataLoader(range(6), collate_fn=keep, shuffle=True)
    for rank in range(2):
        share = list(wire(loader, rank=rank, world_size=2, distributed_sampler=False))
        assert sorted(share) == [[index] for index in range(6)]


def test_overfit_does_not_shuffle(caplog):
    wired = wire(DataLoader(range(6), shuffle=True, collate_fn=keep), overfit=2)
    assert list(wired) == [[index] for index in range(6)]
    wire(OwnLoader(range(3)), overfit=0.5)
    assert "overfit_batches: OwnLoader" in caplog.text


def test_evaluation_is_in_order_and_complete():
    loader = DataLoader(range(7), batch_size=2, shuffle=True, collate_fn=keep)
    assert wire(loader, train=False) is loader, "one process reads what it was given"
    assert list(wire(loader, train=False, world_size=2)) == [[0, 2], [4, 6]]
    assert list(wire(loader, train=False, rank=1, world_size=2)) == [[1, 3], [5]]


def test_set_epoch_reaches_every_part():
    class Part:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    class Data(Part, list):
        pass

    data = Data(range(4))
    combined = CombinedLoader({"a": wire(DataLoader(data)), "b": [1]})
    set_epoch(combined, 4)
    assert data.epoch == 4
    assert combined.loaders["a"].sampler.order.epoch == 4
    set_epoch([1, 2], 1)
    own = Part()
    set_epoch(own, 2)
    assert own.epoch == 2


def test_workers_draw_their_own_numbers_on_every_rank(monkeypatch):
    monkeypatch.setenv("FABRICAMP_SEED_WORKERS", "1")
    drawn = []
    for rank in range(2):
        torch.manual_seed(0)
        wired = wire(DataLoader(Draws(), num_workers=2, batch_size=2, collate_fn=keep), rank=rank, world_size=2)
        drawn += [number for batch in wired for sample in batch for number in sample]
        release_workers(wired)
    assert len(set(drawn)) == len(drawn) == 2 * 4 * 3

    torch.manual_seed(0)
    first_rank = [
        number
        for batch in DataLoader(Draws(), num_workers=2, batch_size=2, collate_fn=keep)
        for s in batch
        for number in s
    ]
    assert drawn[:12] == first_rank[:12], "rank 0 draws what a single process draws"


def test_workers_are_left_to_torch_where_asked(monkeypatch):
    monkeypatch.setenv("FABRICAMP_SEED_WORKERS", "0")
    assert wire(DataLoader(range(4), num_workers=1), rank=1, world_size=2).worker_init_fn is None


def test_persistent_workers_stay_until_released():
    combined = wire(CombinedLoader([DataLoader(range(4), num_workers=1, persistent_workers=True)]))
    member = combined.loaders[0]
    list(combined)
    workers = member._iterator._workers
    list(combined)
    assert member._iterator._workers is workers
    assert workers[0].is_alive()
    release_workers(combined)
    workers[0].join(60)
    assert not workers[0].is_alive()
    assert len(list(combined)) == 4


def test_a_pass_without_persistent_workers_is_left_to_its_loader():
    loader = DataLoader(range(4))
    loader._iterator = iterator = iter(loader)  # torchdata's loader keeps its position in this attribute
    release_workers(loader)
    assert loader._iterator is iterator


@pytest.mark.parametrize(
    ("workers", "context", "device", "pinned"),
    [(1, None, "cuda", True), (0, None, "cuda", False), (1, None, "cpu", False), (1, "spawn", "cuda", False)],
)
def test_batches_of_workers_are_pinned_for_a_gpu(workers, context, device, pinned):
    loader = DataLoader(range(4), num_workers=workers, multiprocessing_context=context)
    wired = wire_loader(loader, train=True, rank=0, world_size=1, seed=0, device=torch.device(device))
    assert wired.pin_memory is pinned


def test_predictions_of_a_plain_batch_sampler_come_in_its_batches():
    loader = DataLoader(
        range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, drop_last=False), collate_fn=keep
    )
    assert list(wire(loader, train=False, world_size=2, in_batches=True)) == [[0, 1], [4, 5]]


def test_groups_that_exchange_nothing_refuse_a_sampler_of_the_users():
    alone = {"gather": lambda value: [value], "world_size": 2}
    with pytest.raises(ConfigError, match=r"DataLoader with range with WeightedRandomSampler.*default sampler"):
        wire(DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)), **alone)
    sharded = DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0))
    assert wire(sharded, **alone) is sharded


class Unready:
    """Cannot be iterated before the run has begun."""

    def __iter__(self):
        raise AttributeError("weights")


@pytest.mark.parametrize("sampler", [Unready(), iter([0, 1])], ids=["unready", "an iterator"])
def test_an_order_that_cannot_be_drawn_twice_is_used_as_it_is(sampler, caplog):
    loader = DataLoader(range(4), sampler=sampler)
    both = {"gather": lambda value: [value, value], "from_first": lambda value: value, "world_size": 2}
    assert wire(loader, **both) is loader
    assert "DataLoader is used as it is" in caplog.text
    if not isinstance(sampler, Unready):
        assert list(sampler) == [0, 1], "nothing was read"


def test_a_sampler_that_yields_less_than_it_said_is_named():
    class Short(list):
        def __len__(self):
            return 5

    both = {"gather": lambda value: [value, value], "from_first": lambda value: value, "world_size": 2}
    for train in (True, False):
        wired = wire(DataLoader(range(4), sampler=Short([1, 2])), train=train, **both)
        with pytest.raises(ConfigError, match="Short announced 5 by its len.. but ended after 2"):
            list(wired)


def test_a_comparison_changes_no_random_numbers():
    sampler = WeightedRandomSampler([1.0] * 50, 50, generator=torch.Generator().manual_seed(3))
    states = random.getstate(), torch.get_rng_state(), sampler.generator.get_state()
    both = {"gather": lambda value: [value, value], "from_first": lambda value: value, "world_size": 2}
    wired = wire(DataLoader(range(50), sampler=sampler), **both)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.equal(sampler.generator.get_state(), states[2])
    expected = list(WeightedRandomSampler([1.0] * 50, 50, generator=torch.Generator().manual_seed(3)))
    assert [int(batch) for batch in wired] == expected[::2]


def test_workers_of_a_shared_loader_draw_their_own_numbers(monkeypatch):
    monkeypatch.setenv("FABRICAMP_SEED_WORKERS", "1")
    both = {"gather": lambda value: [value, value], "from_first": lambda value: value, "world_size": 2}
    loader = DataLoader(range(4), sampler=[0, 1, 2], num_workers=1)
    assert wire(loader, **both).worker_init_fn is None
    assert wire(loader, rank=1, **both).worker_init_fn.keywords == {"rank": 1}
