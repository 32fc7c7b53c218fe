"""Streams sharded among ranks and workers: each sample is seen once, and unsharded streams are detected."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabricamp import ConfigError, TrainingModule
from fabricamp.data import Sharded, wire_loader
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer


class Stream(IterableDataset):
    """Yields numbers in order; with ``splits`` it shards itself among workers, or ranks."""

    def __init__(self, size=26, splits=False):
        self.size, self.splits = size, splits

    def __iter__(self):
        info = get_worker_info()
        place, places = (0, 1) if info is None else (info.id, info.num_workers)
        if dist.is_initialized():
            place, places = dist.get_rank() * places + place, places * dist.get_world_size()
        numbers = range(place, self.size, places) if self.splits else range(self.size)
        return (torch.tensor([float(one), 1.0]) for one in numbers)


class Sees(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].int().tolist()
        return self.net(batch).square().mean() * 1e-6

    def validation_step(self, batch, batch_idx):
        self.validated += batch[:, 0].int().tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(dataset, *, workers=0, validation=None, **options):
    module = Sees()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, **options)
    loaders = [
        None if one is None else DataLoader(one, batch_size=2, num_workers=workers) for one in (dataset, validation)
    ]
    trainer.fit(module, *loaders)
    return module


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [24, 29, 2])
def test_shares_are_disjoint_and_equally_long(size, ranks, workers):
    """Shares are equal in training; validation leaves out no sample."""
    for train in (True, False):
        shares = []
        for rank in range(ranks):
            stream = Sharded(list(range(size)))
            loader = DataLoader(stream, batch_size=None, num_workers=workers if size == 29 and ranks == 2 else 0)
            loader = wire_loader(loader, train=train, rank=rank, world_size=ranks, seed=0)
            shares.append(list(loader))
        seen = [one for share in shares for one in share]
        assert len(set(seen)) == len(seen)
        if train:
            assert len({len(share) for share in shares}) == 1
            assert len(seen) > size - ranks * max(workers, 1)
        else:
            assert sorted(seen) == list(range(size))


def test_one_process_sees_all_in_order():
    assert fitted(Sharded(Stream(9))).seen == list(range(9))


def test_workers_share_a_stream_out():
    module = fitted(Sharded(Stream(26)), workers=2, validation=Sharded(Stream(5)))
    assert sorted(module.seen) == list(range(26))
    assert sorted(module.validated) == list(range(5))


def test_the_epoch_reaches_the_stream():
    class Shuffled(Stream):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    stream = Shuffled()
    fitted(Sharded(stream))
    assert stream.epochs == (0,)


def test_workers_that_read_the_same_are_an_error():
    with pytest.raises(ConfigError, match=r"workers 0 and 1 begin with the same batch of Stream: .*Sharded\(Stream"):
        fitted(Stream(), workers=2)
    assert sorted(fitted(Stream(splits=True), workers=2).seen) == list(range(26))
    assert len(fitted(Stream(), workers=2, use_distributed_sampler=False).seen) == 52


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_workers_that_read_the_same_are_an_error_in_an_evaluation_too(call):
    module = Sees()
    module.test_step, module.predict_step = module.validation_step, module.validation_step
    with pytest.raises(ConfigError, match="workers 0 and 1 begin with the same batch of Stream"):
        getattr(quiet_trainer(), call)(module, DataLoader(Stream(), 2, num_workers=2))


def test_equal_numbers_tell_nothing():
    class Ones(Stream):
        def __iter__(self):
            return (torch.ones(2) for _ in range(8))

    assert len(fitted(Ones(), workers=2).seen) == 16


def on_two_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shared = fitted(Sharded(Stream(27)), strategy="ddp", devices="auto", validation=Sharded(Stream(7)))
        itself = fitted(Stream(splits=True), strategy="ddp", devices="auto").seen
        try:
            fitted(Stream(), strategy="ddp", devices="auto")
        except ConfigError as error:
            return shared.seen, shared.validated, itself, str(error)


def test_two_ranks():
    (first, validated, own, error), (second, also_validated, also_own, same_error) = run_ranks(on_two_ranks, 2)
    assert (first, second) == (list(range(0, 26, 2)), list(range(1, 26, 2)))
    assert sorted(validated + also_validated) == list(range(7))
    assert sorted(own + also_own) == list(range(26))
    assert error == same_error
    assert "ranks [0, 1] begin with the same batch of Stream" in error
