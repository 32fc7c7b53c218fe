"""Streams and loaders of other libraries, resumed at five positions of two epochs: exact, by their own state or read again."""

from __future__ import annotations

import io
import itertools
import logging
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp import Callback, TrainingModule
from fabricamp._utils.say_once import say_once
from fabricamp.data import Sharded, kept_positions
from fabricamp.data.kept_positions import EXACT, _stateful_parts, untried_part
from fabricamp.data.position import is_stateful
from fabricamp.data.unrepeatable import unrepeatable_order
from tests.small import quiet_trainer

BATCH = 4
BATCHES = 12  # in an epoch, of the streams that neither drop nor add examples
POSITIONS = (1, 3, 6, 9, 11)  # a shuffle buffer of 10 is refilled within the first two, and again within the others


def examples(number=BATCH * BATCHES, first=0, shards=4):
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    columns = {"x": list(range(first, first + number)), "y": ["a"] * number}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=shards)


def written(files):
    for file in files:
        yield from ({"x": file * 12 + number} for number in range(12))


def generated():
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    return datasets.IterableDataset.from_generator(written, gen_kwargs={"files": [0, 1, 2, 3]})


def more(example):
    return {"x": example["x"] + 1}


def doubled(batch):
    return {"x": [value for value in batch["x"] for _ in range(2)]}


def interleaved(**options):
    examples()
    from datasets import interleave_datasets

    return interleave_datasets([examples().map(more), examples(20, 100, 2).map(more)], **options)


def concatenated(axis):
    examples()
    from datasets import concatenate_datasets

    pairs = {0: (examples(), examples(12, 100)), 1: (examples().remove_columns("y"), examples().select_columns("y"))}
    return concatenate_datasets(list(pairs[axis]), axis=axis)


def of_a_rank():
    examples()
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(examples(96, shards=3), 1, 2)


EXACT_STREAMS = {
    "plain": examples,
    "from a generator": generated,
    "map": lambda: examples().map(more),
    "map of batches that grow": lambda: examples(24).map(doubled, batched=True, batch_size=5, remove_columns=["y"]),
    "map with indices": lambda: generated().map(
        lambda example, number: {"x": example["x"] + number}, with_indices=True
    ),
    "filter": lambda: examples(64).filter(lambda example: example["x"] % 4 > 0),
    "filter of batches": lambda: examples(64).filter(
        lambda batch: [x % 4 > 0 for x in batch["x"]], batched=True, batch_size=5
    ),
    "select": lambda: examples().select_columns("x"),
    "take": lambda: examples(60).take(48),
    "skip": lambda: examples(52).map(more).skip(4),
    "repeat": lambda: examples(24).repeat(2),
    "one after the other": lambda: concatenated(0),
    "side by side": lambda: concatenated(1),
    "in turn": lambda: interleaved(stopping_strategy="all_exhausted"),
    "at random": lambda: interleaved(probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted"),
    "of a rank": of_a_rank,
}


def interleave_shuffled():
    examples()
    from datasets import interleave_datasets

    streams = [examples().shuffle(seed=1, buffer_size=10), examples(48, 100)]
    return interleave_datasets(streams, stopping_strategy="all_exhausted")


INEXACT_STREAMS = {
    "shuffle": lambda: examples().shuffle(seed=1, buffer_size=10),
    "shuffle from a generator": lambda: generated().shuffle(seed=1, buffer_size=10),
    "shuffle, then map": lambda: examples().shuffle(seed=1, buffer_size=10).map(more),
    "shuffle within another": interleave_shuffled,
}


class Own(IterableDataset):
    """A stream of the user's that keeps its position."""

    def __init__(self, size=BATCH * BATCHES, first=0):
        self.size, self.first, self.count = size, first, 0

    def __iter__(self):
        while self.count < self.size:
            self.count += 1
            yield self.first + self.count - 1
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Around(IterableDataset):
    """A stream of the user's that hands on the state of another library's."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream)

    def set_epoch(self, epoch):
        self.stream.set_epoch(epoch)

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state_dict):
        self.stream.load_state_dict(state_dict)


def unchanged(batch):
    return batch


def nodes():
    return pytest.importorskip("torchdata.nodes", reason="needs the package torchdata")


def of_nodes(stream, around=unchanged):
    wrapped = nodes().Batcher(nodes().IterableWrapper(stream), BATCH)
    return nodes().Loader(around(wrapped))


def weighted():
    sources = {"a": nodes().IterableWrapper(Own()), "b": nodes().IterableWrapper(Own(20, 100))}
    return nodes().Loader(
        nodes().Batcher(nodes().MultiNodeWeightedSampler(sources, {"a": 0.7, "b": 0.3}, seed=3), BATCH)
    )


def stateful_loader(data, **options):
    kind = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata").StatefulDataLoader
    return kind(data, BATCH, **options)


EXACT_LOADERS = {
    "a loader": lambda: stateful_loader(list(range(48)), shuffle=True),
    "a loader with workers": lambda: stateful_loader(list(range(48)), shuffle=True, num_workers=2),
    "a loader of an own stream": lambda: stateful_loader(Own()),
    "nodes": lambda: of_nodes(Own()),
    "nodes over a list": lambda: of_nodes(list(range(48))),
    "nodes that read ahead": lambda: of_nodes(Own(), lambda node: nodes().Prefetcher(node, 3)),
    "nodes in batches": lambda: of_nodes(Own(), lambda node: nodes().Batcher(nodes().Unbatcher(node), 3)),
    "nodes that map": lambda: of_nodes(Own(), lambda node: nodes().Mapper(node, unchanged)),
    "nodes in threads": lambda: of_nodes(
        Own(), lambda node: nodes().ParallelMapper(node, unchanged, num_workers=2, method="thread")
    ),
    "nodes by weight": weighted,
    "nodes with a sampler": lambda: nodes().Loader(
        nodes().Batcher(nodes().MapStyleWrapper(list(range(48)), torch.utils.data.SequentialSampler(range(48))), BATCH)
    ),
}


class Sees(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, list):
            batch = {"x": torch.as_tensor([int(one["x"] if isinstance(one, dict) else one) for one in batch])}
        numbers = batch["x"] if isinstance(batch, dict) else batch
        self.seen.append(numbers.tolist())
        return self.net(numbers[:, None].float()).square().mean() * 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesAlways(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{batch_idx + 1}-{trainer.global_step}.ckpt")


def seen(loader, *, ckpt_path=None, **options):
    torch.manual_seed(7)
    module = Sees()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's, and of tensors that are read-only
        quiet_trainer(max_epochs=3, **options).fit(module, loader, ckpt_path=ckpt_path)
    return module.seen


def check_exact(make, folder, positions=POSITIONS):
    """Resumes a run of three epochs over ``make()`` at the positions of the first two epochs; each ends as the whole run did."""
    whole = seen(make(), callbacks=[SavesAlways(folder)])
    for epoch, position in itertools.product((0, 1), positions):
        (path,) = folder.glob(f"{epoch}-{position}-*.ckpt")
        steps = int(path.stem.rpartition("-")[2])
        assert seen(make(), ckpt_path=path) == whole[steps:], (epoch, position)


def in_batches(stream, **options):
    return DataLoader(stream.select_columns("x").with_format("torch"), BATCH, **options)


@pytest.mark.parametrize("kind", EXACT_STREAMS)
def test_a_stream_of_datasets_continues_by_its_own_state(kind, tmp_path):
    assert is_stateful(in_batches(EXACT_STREAMS[kind]()))
    check_exact(lambda: in_batches(EXACT_STREAMS[kind]()), tmp_path)


@pytest.mark.parametrize("kind", INEXACT_STREAMS)
@pytest.mark.parametrize("around", [unchanged, Around])
def test_a_stream_that_loses_its_buffer_is_read_again(kind, around, tmp_path, caplog):
    def make():
        return DataLoader(around(INEXACT_STREAMS[kind]().select_columns("x").with_format("torch")), BATCH)

    assert not is_stateful(make())
    with caplog.at_level(logging.WARNING, "fabricamp"):
        check_exact(make, tmp_path)
    assert "the state of BufferShuffledExamplesIterable of datasets " in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_over_such_a_stream_is_read_again(workers, tmp_path):
    def make():
        return stateful_loader(
            INEXACT_STREAMS["shuffle"]().select_columns("x").with_format("torch"), num_workers=workers
        )

    assert not is_stateful(make())
    check_exact(make, tmp_path)


@pytest.mark.parametrize("kind", EXACT_LOADERS)
def test_a_loader_of_torchdata_continues_by_its_own_state(kind, tmp_path):
    assert is_stateful(EXACT_LOADERS[kind]())
    check_exact(EXACT_LOADERS[kind], tmp_path)


def test_nodes_over_a_stream_of_datasets_are_read_again(tmp_path):
    assert untried_part(of_nodes(examples())) == "IterableDataset of datasets within Loader of torchdata"
    check_exact(lambda: of_nodes(examples().select_columns("x")), tmp_path)


@pytest.mark.parametrize("library", EXACT)
def test_each_entry_of_the_table_is_tried(library):
    makes = {"datasets": EXACT_STREAMS, "torchdata": EXACT_LOADERS}[library]
    parts = []
    for make in makes.values():
        source = make()
        parts += _stateful_parts(source, {})
        if library == "torchdata":
            running = iter(source)
            next(running)
            parts += _stateful_parts(source, {})
    assert {type(part).__name__ for part in parts} >= EXACT[library].types


@pytest.mark.parametrize("around", [unchanged, Around])
def test_a_resumed_run_leaves_no_state_in_a_stream_for_the_next_run(around, tmp_path):
    loader = DataLoader(around(examples().select_columns("x").with_format("torch")), BATCH)
    whole = seen(loader, callbacks=[SavesAlways(tmp_path)])
    (path,) = tmp_path.glob("0-3-*.ckpt")
    assert seen(loader, ckpt_path=path) == whole[3:]
    assert seen(loader) == whole


def test_another_version_is_read_again(monkeypatch):
    loader = in_batches(examples())
    monkeypatch.setattr(kept_positions, "_version_of", lambda library: (5, 3, 0))
    assert untried_part(loader.dataset) == "IterableDataset of datasets 5.3.0"
    assert not is_stateful(loader)


def test_a_stream_of_the_users_keeps_its_promise():
    loader = DataLoader(Own(), BATCH)
    assert is_stateful(loader)


# -- WebDataset --------------------------------------------------------------------------------------------------------------------


def shards(folder):
    """Writes four shards of eight numbers; returns their paths."""
    paths = []
    for shard in range(4):
        path = Path(folder) / f"{shard}.tar"
        with tarfile.open(path, "w") as file:
            for number in range(shard * 8, shard * 8 + 8):
                content = io.BytesIO()
                torch.save(torch.tensor(number), content)
                member = tarfile.TarInfo(f"{number:03d}.pth")
                member.size = content.tell()
                content.seek(0)
                file.addfile(member, content)
        paths.append(str(path))
    return paths


def webdataset(folder, change, **options):
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset")
    stream = wds.WebDataset(shards(folder), **{"shardshuffle": False, **options})
    return change(stream.decode()).to_tuple("pth").map(lambda sample: {"x": sample[0]})


def by_time(stream):
    return stream.shuffle(10, initial=10)


def by_seed(stream):
    return stream.shuffle(10, initial=10, seed=3)


def by_pass(stream):
    import webdataset

    return stream.compose(webdataset.detshuffle(10, 10))


@pytest.mark.parametrize(
    ("change", "workers", "says"),
    [
        (by_time, 0, "shuffles by the process's number"),
        (by_time, 1, "shuffles by the process's number"),
        (by_seed, 0, None),
        (by_pass, 0, "counts the passes"),
        (by_pass, 1, None),
        (unchanged, 0, None),
    ],
)
def test_an_order_that_cannot_be_repeated_is_told_before_it_begins(change, workers, says, tmp_path, caplog):
    told = []

    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            told.append(caplog.text)

    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fabricamp"):
        seen(DataLoader(webdataset(tmp_path, change), BATCH, num_workers=workers), callbacks=[Looks()])
    assert ("WebDataset " in told[0]) == (says is not None)
    assert says is None or says in told[0]


def test_a_stream_within_others_is_told(tmp_path):
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset")
    stream = webdataset(tmp_path, by_time)
    for loader in (wds.WebLoader(stream, batch_size=BATCH), DataLoader(Sharded(stream), BATCH)):
        assert "shuffle(..., seed=...)" in unrepeatable_order(loader)
    counts = webdataset(tmp_path, by_pass)
    assert unrepeatable_order(wds.WebLoader(counts, batch_size=BATCH, num_workers=1)) is None
    assert unrepeatable_order(wds.WebLoader(counts, batch_size=BATCH)) is not None


def test_workers_that_hand_out_of_order_are_told(caplog):
    say_once.cache_clear()
    numbers = torch.arange(16)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        seen(DataLoader(numbers, BATCH, num_workers=2))
        assert "in_order" not in caplog.text
        seen(DataLoader(numbers, BATCH, num_workers=2, in_order=False))
    assert (
        "DataLoader hands out batches as its workers finish; give in_order=True, the default: as it is" in caplog.text
    )
    assert unrepeatable_order(DataLoader(numbers, BATCH, num_workers=1, in_order=False)) is None


def test_shards_drawn_anew_are_told(tmp_path):
    stream = webdataset(tmp_path, unchanged, resampled=True)
    assert "ResampledShards(..., deterministic=True)" in unrepeatable_order(DataLoader(stream, BATCH))
    stream.pipeline[0].deterministic = True
    assert "counts the passes" in unrepeatable_order(DataLoader(stream, BATCH))
    assert unrepeatable_order(DataLoader(stream, BATCH, num_workers=1)) is None


def test_a_shuffle_with_a_seed_is_exact(tmp_path):
    check_exact(lambda: DataLoader(webdataset(tmp_path, by_seed), BATCH), tmp_path, positions=(1, 3, 4, 6, 7))
