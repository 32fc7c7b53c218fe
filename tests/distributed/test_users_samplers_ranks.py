"""Samplers and batch samplers of a user on several ranks: rank 0's order is shared, in training, in evaluations and on a resume."""

from __future__ import annotations

import functools
import itertools
import logging
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabricamp import Callback, TrainingModule
from fabricamp._utils.say_once import say_once
from fabricamp.data import CombinedLoader
from fabricamp.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

SIZE = 24
BATCH = 2
EPOCHS = 3


class Indices(Dataset):
    """Each sample is its index; can be read by any key that ends in it."""

    def __len__(self):
        return SIZE

    def __getitem__(self, key):
        if isinstance(key, list):
            return key
        return int(str(key).removeprefix("sample "))


class Shuffles(Sampler):
    """Shuffles a list of its own in place, by Python's generator, and counts its passes."""

    def __init__(self, draw=random.shuffle):
        self.order, self.passes, self.draw = list(range(SIZE)), 0, draw

    def __len__(self):
        return SIZE

    def __iter__(self):
        self.draw(self.order)
        self.passes += 1
        return iter(self.order)


class ByEpoch(Sampler):
    """Follows from ``set_epoch`` alone; yields keys."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter([f"sample {(index * 5 + (self.epoch or 0)) % SIZE}" for index in range(SIZE)])


class Blocks(Sampler):
    """A batch sampler: neighbours, in batches of one to three."""

    def __len__(self):
        return 12

    def __iter__(self):
        for number in torch.randperm(12).tolist():
            yield [2 * number, 2 * number + 1, 0][: 1 + number % 3]


class OwnBatches(BatchSampler):
    pass


class OwnLoader(DataLoader):
    pass


def weighted(**options):
    return WeightedRandomSampler([1.0, 2.0] * (SIZE // 2), SIZE, **options)


MAKES = {
    "weighted": lambda: DataLoader(Indices(), BATCH, sampler=weighted()),
    "a generator of its own": lambda: DataLoader(Indices(), BATCH, sampler=weighted(generator=torch.Generator())),
    "subset": lambda: DataLoader(Indices(), BATCH, sampler=SubsetRandomSampler(range(1, 22))),
    "Python's numbers": lambda: DataLoader(Indices(), BATCH, sampler=Shuffles()),
    "NumPy's numbers": lambda: DataLoader(Indices(), BATCH, sampler=Shuffles(np.random.shuffle)),
    "keys by epoch": lambda: DataLoader(Indices(), BATCH, sampler=ByEpoch()),
    "plain batches given": lambda: DataLoader(Indices(), batch_sampler=BatchSampler(weighted(), BATCH, drop_last=True)),
    "batches": lambda: DataLoader(Indices(), batch_sampler=Blocks()),
    "batches of a class": lambda: DataLoader(Indices(), batch_sampler=OwnBatches(RandomSampler(Indices()), 4, False)),
    "batches as a sampler": lambda: DataLoader(
        Indices(), sampler=BatchSampler(SequentialSampler(range(SIZE)), 4, False), batch_size=None, collate_fn=list
    ),
    "workers": lambda: DataLoader(Indices(), BATCH, sampler=weighted(), num_workers=2, persistent_workers=True),
    "a loader of a class": lambda: OwnLoader(Indices(), BATCH, shuffle=True),
    "a list": lambda: DataLoader(Indices(), BATCH, sampler=[3, 1, 4, 1, 5, 9]),
}


class Records(TrainingModule):
    """Records the samples of each batch with their epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.seen, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, torch.as_tensor(batch).tolist()))
        return self.weight.square().sum()

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch.tolist())

    def predict_step(self, batch, batch_idx):
        return batch

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    def __init__(self, path, epoch, batch_idx):
        self.path, self.place = path, (epoch, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path)


def seed_all(seed):
    for place in (torch.manual_seed, random.seed, np.random.seed):
        place(seed)


def train(make, *, seed=3, per_rank=0, ckpt_path=None, save=(None, 0, 0), strategy="ddp", **options):
    """Trains with the loader that ``make`` returns; returns this rank's samples."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    seed_all(seed + per_rank * rank)
    module = Records()
    trainer = quiet_trainer(
        strategy=strategy if dist.is_initialized() else "single",
        devices="auto",
        **{"max_epochs": EPOCHS, "callbacks": [Saves(*save)], **options},
    )
    trainer.fit(module, make(), ckpt_path=ckpt_path)
    return module.seen


def order_of(ranks, epoch, *, in_batches=False):
    """Returns the order from which the ranks' samples (or batches) of an epoch are dealt out."""
    own = [[batch for of, batch in seen if of == epoch] for seen in ranks]
    if not in_batches:
        own = [list(itertools.chain(*batches)) for batches in own]
    return list(itertools.chain(*zip(*own, strict=True)))


def filled_up(order, ranks):
    """Returns ``order`` with its first items repeated, as DistributedSampler does, so that all ranks get as many."""
    return [order[index % len(order)] for index in range(-(-len(order) // ranks) * ranks)]


def every_kind(per_rank):
    return {name: train(make, per_rank=per_rank) for name, make in MAKES.items()}


@pytest.mark.parametrize(("world", "per_rank"), [(2, 0), (3, 100)], ids=["equal seeds", "seeds by rank"])
def test_ranks_share_the_order_of_a_single_process(world, per_rank):
    ranks = run_ranks(every_kind, world, per_rank)
    for name, make in MAKES.items():
        one, several = train(make), [rank[name] for rank in ranks]
        in_batches = "batches" in name and "plain" not in name
        for epoch in range(EPOCHS):
            order = order_of([one], epoch, in_batches=in_batches)
            assert order_of(several, epoch, in_batches=in_batches) == filled_up(order, world), (name, epoch)
        assert len(several[0]) == len(several[1])
        assert several[0] != several[1]


class ByRank(Sampler):
    """Shards itself by what torch.distributed says, without a word about it in its attributes."""

    def __len__(self):
        return SIZE // 2

    def __iter__(self):
        return iter(range(dist.get_rank(), SIZE, 2))


class Uncopyable(Shuffles):
    def __deepcopy__(self, memo):
        raise TypeError("not copied")


class OnceOnly(Sampler):
    """Yields its samples once, and is its own iterator."""

    def __init__(self):
        self.left = list(range(8))

    def __len__(self):
        return 8

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def listen():
    """Returns a list of the messages from here on."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    say_once.cache_clear()
    return messages


def kept_as_they_are():
    messages = listen()
    rank = dist.get_rank()
    one_pass = functools.partial(train, max_epochs=1)
    data = Indices()
    return messages, {
        "by rank": one_pass(lambda: DataLoader(data, BATCH, sampler=ByRank())),
        "own seeds": one_pass(
            lambda: DataLoader(data, BATCH, sampler=weighted(generator=torch.Generator().manual_seed(rank)))
        ),
        "torch's": one_pass(lambda: DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))),
        "once": one_pass(lambda: DataLoader(data, BATCH, sampler=OnceOnly())),
        "all": one_pass(lambda: DataLoader(data, BATCH, sampler=weighted()), use_distributed_sampler=False),
        "uncopyable": one_pass(lambda: DataLoader(data, BATCH, sampler=Uncopyable())),
    }


def test_what_is_not_shared():
    (messages, first), (_, second) = run_ranks(kept_as_they_are, 2)
    assert order_of([first["by rank"], second["by rank"]], 0) == list(range(SIZE))
    assert len(first["own seeds"]) == SIZE // BATCH
    assert first["own seeds"] != second["own seeds"]
    assert order_of([first["torch's"], second["torch's"]], 0) == list(range(SIZE))
    assert order_of([first["once"]], 0) == order_of([second["once"]], 0) == list(range(8))
    assert first["all"] == second["all"]
    assert len(first["all"]) == SIZE // BATCH
    assert sorted(order_of([first["uncopyable"], second["uncopyable"]], 0)) == list(range(SIZE))
    said = [message.split(":")[0] for message in messages if "used as it is" in message]
    assert said == [
        "DataLoader with Indices with ByRank is used as it is",
        "DataLoader with Indices with WeightedRandomSampler is used as it is",
        "DataLoader is used as it is",
    ]


class Endless(Sampler):
    """Permutations of torch's global generator without an end, and without a length."""

    def __iter__(self):
        while True:
            yield from torch.randperm(SIZE).tolist()


class NoLength(Sampler):
    """Ends without having said when."""

    def __iter__(self):
        return iter(range(SIZE - 3))


class DrawsByRank(Records):
    """Consumes as many random numbers as its rank says."""

    def training_step(self, batch, batch_idx):
        torch.rand(dist.get_rank() * 7)
        return super().training_step(batch, batch_idx)


def endless(path, ckpt_path=None, max_steps=60):
    seed_all(3 if ckpt_path is None else 4)
    module = DrawsByRank()
    trainer = quiet_trainer(strategy="ddp", devices="auto", max_steps=max_steps, callbacks=[Saves(path, 0, 39)])
    trainer.fit(module, DataLoader(Indices(), 4, sampler=Endless()), ckpt_path=ckpt_path)
    return module.seen, train(lambda: DataLoader(Indices(), BATCH, sampler=NoLength()), max_epochs=1)


def test_samplers_without_a_length_are_shared_in_rounds(tmp_path):
    path = tmp_path / "a.ckpt"
    ranks = run_ranks(endless, 2, path)
    order = order_of([seen for seen, _ in ranks], 0)
    assert len(order) == 60 * 4 * 2
    for first in range(0, len(order), SIZE):
        assert sorted(order[first : first + SIZE]) == list(range(SIZE)), "each permutation comes complete"
    assert order_of([ended for _, ended in ranks], 0) == list(range(SIZE - 4)), "an incomplete last round is left out"

    resumed = run_ranks(endless, 2, None, path)
    assert [seen for seen, _ in resumed] == [seen[40:] for seen, _ in ranks]
    more = run_ranks(endless, 4, None, path, 50)
    assert order_of([seen for seen, _ in more], 0) == order[40 * 8 : 40 * 8 + 10 * 16]


RESUMED = ["weighted", "a generator of its own", "subset", "keys by epoch", "plain batches given", "batches", "workers",
           "a loader of a class"]  # fmt: skip


def together(name):
    """Returns a loader of two, the second of which is shorter and begins again."""
    return CombinedLoader(
        {"a": MAKES[name](), "b": DataLoader(Indices(), BATCH, sampler=SubsetRandomSampler(range(7)))},
        "max_size_cycle",
    )


class RecordsBoth(Records):
    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, [*batch["a"].tolist(), *batch["b"].tolist()]))
        return self.weight.square().sum()


def trained(folder, world, ckpt_from=None, strategy="ddp"):
    """Trains with every kind of sampler; saves in the second epoch, or continues what ``ckpt_from`` ranks have saved."""
    results = {}
    for name in RESUMED:
        # After 6 batches of one process, 3 of two and so on.
        save = (None, 0, 0) if ckpt_from else (folder / f"{name}{world}.ckpt", 1, 6 // world - 1)
        path = folder / f"{name}{ckpt_from}.ckpt" if ckpt_from else None
        seed = 8 if ckpt_from else 3
        results[name] = train(MAKES[name], seed=seed, ckpt_path=path, save=save, strategy=strategy)
    return results


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_continues_in_the_order(strategy, tmp_path):
    straight = trained(tmp_path, 1)
    two = run_ranks(trained, 2, tmp_path, 2, None, strategy)
    again = run_ranks(trained, 2, tmp_path, 2, 2, strategy)
    widened = run_ranks(trained, 2, tmp_path, 2, 1, strategy)
    three = run_ranks(trained, 3, tmp_path, 3, 2, strategy)
    narrowed = trained(tmp_path, 1, 2)
    for name in RESUMED:
        in_batches = name == "batches"
        for rank in range(2):
            whole = two[rank][name]
            assert again[rank][name] == whole[-len(again[rank][name]) :]
            assert widened[rank][name] == again[rank][name], (name, "one process began, two continue")
        size = 6 if in_batches else 6 * BATCH
        for epoch in (1, 2):
            order = order_of([straight[name]], epoch, in_batches=in_batches)[size if epoch == 1 else 0 :]
            assert order_of([narrowed[name]], epoch, in_batches=in_batches) == order, (name, epoch)
            wide = order_of([rank[name] for rank in three], epoch, in_batches=in_batches)
            assert wide[: len(order)] == order, (name, epoch)
            assert len(wide) <= len(order) + 2


def trained_on_both(folder, ckpt_from=None, world=2):
    results = {}
    for name in ("weighted", "subset", "workers"):
        module = RecordsBoth()
        seed_all(8 if ckpt_from else 3)
        path = folder / f"{name}{ckpt_from or world}.ckpt"
        trainer = quiet_trainer(
            strategy="ddp" if world > 1 else "single",
            devices="auto",
            max_epochs=EPOCHS,
            callbacks=[Saves(None if ckpt_from else path, 1, 2)],
        )
        trainer.fit(module, together(name), ckpt_path=path if ckpt_from else None)
        results[name] = module.seen
    return results


def test_loaders_side_by_side_continue_in_their_orders(tmp_path):
    straight = run_ranks(trained_on_both, 2, tmp_path)
    resumed = run_ranks(trained_on_both, 2, tmp_path, 2)
    for rank in range(2):
        for name, seen in resumed[rank].items():
            assert seen == straight[rank][name][-len(seen) :], name
            assert len(seen) < len(straight[rank][name])


def test_a_single_process_cannot_continue_within_a_batch(tmp_path):
    run_ranks(trained, 2, tmp_path, 2)
    with pytest.raises(CheckpointError, match="after 12 samples of an epoch.*a batch_size that divides 12"):
        train(
            lambda: DataLoader(Indices(), 5, sampler=weighted()),
            ckpt_path=tmp_path / "weighted2.ckpt",
        )


class Forgets(Sampler):
    """Shuffles by a generator of its own that no checkpoint holds."""

    def __init__(self):
        self.numbers = random.Random(4)

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(self.numbers.sample(range(SIZE), SIZE))


def forgetful(path, ckpt_path):
    messages = listen()
    train(lambda: DataLoader(Indices(), BATCH, sampler=Forgets()), save=(path, 1, 2), ckpt_path=ckpt_path)
    return messages


def test_an_order_that_cannot_be_repeated_is_told(tmp_path):
    path = tmp_path / "a.ckpt"
    told = "Forgets does not repeat the order in which this epoch began"
    for ckpt_path, expected in ((None, 0), (path, 1)):
        first, second = run_ranks(forgetful, 2, None if ckpt_path else path, ckpt_path)
        assert sum(told in message for message in first) == expected
        assert not any(told in message for message in second)


def evaluated():
    results = {}
    for name, make in MAKES.items():
        if name == "batches as a sampler":
            continue
        several = dist.is_initialized()
        seed_all(3 + dist.get_rank() if several else 3)
        module = Records()
        trainer = quiet_trainer(strategy="ddp" if several else "single", devices="auto")
        trainer.test(module, make(), verbose=False)
        tested = module.evaluated
        predictions = trainer.predict(module, make())
        results[name] = tested, [batch.tolist() for batch in predictions]
    return results


def test_evaluations_use_each_sample_once():
    ranks = run_ranks(evaluated, 2)
    for name, (tested, predicted) in evaluated().items():
        several = [rank[name][0] for rank in ranks]
        count = sum(map(len, tested))
        assert sum(len(batch) for own in several for batch in own) == count, name
        samples = sorted(itertools.chain(*tested))
        together = sorted(sample for own in several for batch in own for sample in batch)
        if "weighted" not in name and name not in ("a generator of its own", "plain batches given", "workers"):
            assert together == samples, name
        assert several[0] != several[1]
        of_ranks = ranks[0][name][1]
        assert of_ranks == ranks[1][name][1]
        assert list(map(len, of_ranks)) == list(map(len, predicted)) or name == "batches", name
        if name in ("keys by epoch", "a list"):
            assert of_ranks == predicted, "in the order of the samples"
