"""LengthGroups: batches of samples of similar length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, TrainingModule
from fabricamp.data import LengthGroups, wire_loader
from fabricamp.data.position import batches_before, enter, position_of
from tests.small import quiet_trainer

LENGTHS = torch.randint(1, 100, (403,), generator=torch.Generator().manual_seed(0)).tolist()


def padding(batches):
    """Returns the share of padding in the padded batches."""
    padded = sum(len(one) * max(LENGTHS[index] for index in one) for one in batches)
    return 1 - sum(LENGTHS) / padded


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
)
def test_every_sample_is_in_one_batch_of_one_rank(lengths, ranks, shuffle, by_tokens, epoch):
    options = {"max_tokens": 20 + len(lengths)} if by_tokens else {"batch_size": 4}
    seen, counts = [], set()
    for rank in range(ranks):
        groups = LengthGroups(lengths, shuffle=shuffle, group=2, **options)
        groups.share_out(rank, ranks, train=False)
        groups.set_epoch(epoch)
        own = list(groups)
        assert len(groups) == len(own)
        seen += [index for batch in own for index in batch]
        groups.share_out(rank, ranks, train=True)
        counts.add(len(list(groups)))
        for batch in own:
            assert len(batch) * max(lengths[one] for one in batch) <= options.get("max_tokens", 20 * 4)
    assert sorted(seen) == list(range(len(lengths)))
    assert len(counts) == 1


def test_padding_is_saved_and_epochs_differ():
    groups = LengthGroups(LENGTHS, batch_size=8, group=10)
    first = list(groups)
    assert padding(first) < 0.12
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    assert padding([order[first : first + 8] for first in range(0, len(order), 8)]) > 0.35
    assert list(groups) == first
    groups.set_epoch(1)
    assert list(groups) != first
    assert [len(one) for one in LengthGroups(LENGTHS, batch_size=8, drop_last=True, group=51)] == [8] * 50


class Drawn(torch.utils.data.Dataset):
    """Returns each index with random numbers drawn for it; records which indices were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([index, torch.randint(1000, ()).item()])


@pytest.mark.parametrize("prefetch_batches", [0, 1])
def test_a_resumed_epoch_draws_the_same_and_reads_nothing_that_lies_behind(tmp_path, prefetch_batches):
    class Sees(TrainingModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(2, 1), []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.tolist())
            return self.net(batch.float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 13:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def fitted(**options):
        torch.manual_seed(0)
        module, dataset = Sees(), Drawn()
        trainer = quiet_trainer(max_epochs=2, callbacks=[Saves()], prefetch_batches=prefetch_batches)
        trainer.fit(module, DataLoader(dataset, batch_sampler=LengthGroups(LENGTHS[:40], batch_size=4)), **options)
        return module.seen, dataset.read

    (straight, _), (resumed, read) = fitted(), fitted(ckpt_path=tmp_path / "a.ckpt")
    assert resumed == straight[13:]
    assert sorted(read) == sorted(index for batch in resumed for index, _ in batch)


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_another_number_of_ranks_goes_on_behind_the_same_batches(samples, before, ranks, done):
    def loader_of(rank, world_size):
        loader = DataLoader(range(samples), batch_sampler=LengthGroups(LENGTHS[:samples], batch_size=2))
        return wire_loader(loader, train=True, rank=rank, world_size=world_size, seed=0)

    order = list(LengthGroups(LENGTHS[:samples], batch_size=2))
    done = min(done, len(loader_of(0, before)))
    place = position_of(loader_of(0, before), {}, done)
    shares = []
    for rank in range(ranks):
        loader = loader_of(rank, ranks)
        behind = batches_before(loader, place)
        assert enter(loader, place) == 0
        shares.append([batch.tolist() for batch in loader])
        assert behind + len(shares[-1]) == len(loader)
        left = order[done * before :]
        assert position_of(loader, place, len(shares[-1]))["batches_of_all_ranks"] >= len(order) or not left
    rounds = [one for group in zip(*shares, strict=True) for one in group]
    assert rounds[: len(left)] == left


def test_the_trainer_shares_it_out_and_goes_on_in_it(tmp_path):
    class Sees(TrainingModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.tolist())
            return self.net(batch.float()[:, None]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 15:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def fitted(**options):
        module = Sees()
        trainer = quiet_trainer(max_epochs=2, callbacks=[Saves()])
        trainer.fit(module, DataLoader(range(40), batch_sampler=LengthGroups(LENGTHS[:40], batch_size=4)), **options)
        return module

    straight, resumed = fitted(), fitted(ckpt_path=tmp_path / "a.ckpt")
    assert straight.seen[:10] != straight.seen[10:]
    assert resumed.seen == straight.seen[15:]
    shares = []
    for rank in range(2):
        loader = DataLoader(range(40), batch_sampler=LengthGroups(LENGTHS[:40], batch_size=4))
        loader = wire_loader(loader, train=True, rank=rank, world_size=2, seed=0)
        shares += [one for batch in loader for one in batch.tolist()]
    assert sorted(shares) == list(range(40))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of them"),
        ({"batch_size": 2, "max_tokens": 9}, "give one of them"),
        ({"batch_size": 0}, r"batch_size=0\) is not allowed; give a whole number from 1"),
        ({"max_tokens": 8}, "sample 1 is 9 long, more than max_tokens=8"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        LengthGroups([3, 9], **options)
