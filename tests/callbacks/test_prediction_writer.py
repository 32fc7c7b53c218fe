"""BasePredictionWriter: the samples' indices, the form of its arguments, and the arguments that it refuses."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset, WeightedRandomSampler

from fabricamp import Callback
from fabricamp._utils.say_once import say_once
from fabricamp.callbacks import BasePredictionWriter
from fabricamp.errors import ConfigError, UnknownArgumentError
from tests.inside import session
from tests.small import Classifier, quiet_trainer
from tests.small import loader as trained_on

SAMPLES = torch.arange(11) * 10


class Repeats(Classifier):
    """Predicts its input, which is ten times the sample's index."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch.clone()


class Notes(BasePredictionWriter):
    def __init__(self, write_interval):
        super().__init__(write_interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert torch.equal(prediction, batch)
        self.batches.append((dataloader_idx, batch_idx, prediction.tolist(), batch_indices))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


class Odd:
    """A batch sampler without a length; it yields its indices in one tensor, which it reuses."""

    def __iter__(self):
        indices = torch.zeros(2, dtype=torch.int64)
        for start in (5, 0, 7):
            indices.copy_(torch.tensor([start, start + 1]))
            yield indices


def written(loaders, write_interval="batch", **options):
    writer = Notes(write_interval)
    trainer = quiet_trainer(callbacks=[writer], **options)
    trainer.predict(Repeats(), loaders, return_predictions=False)
    return writer


LOADERS = {
    "in order": lambda: DataLoader(SAMPLES, batch_size=4),
    "shuffled": lambda: DataLoader(SAMPLES, batch_size=4, shuffle=True),
    "without the rest": lambda: DataLoader(SAMPLES, batch_size=4, drop_last=True),
    "workers": lambda: DataLoader(SAMPLES, batch_size=2, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(SAMPLES, batch_size=2, num_workers=1, persistent_workers=True),
    "drawn": lambda: DataLoader(SAMPLES, batch_size=3, sampler=WeightedRandomSampler([1.0] * 11, 6)),
    "batches of its own": lambda: DataLoader(SAMPLES, batch_sampler=[[3, 1, 4], (1, 5), [9]]),
    "no length": lambda: DataLoader(SAMPLES, batch_sampler=Odd()),
    "sample by sample": lambda: DataLoader(SAMPLES, batch_size=None, shuffle=True),
    "batch by batch": lambda: DataLoader(
        SAMPLES, batch_size=None, sampler=BatchSampler(RandomSampler(SAMPLES), 4, False)
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_batch_comes_with_the_indices_of_its_samples(kind):
    loader = LOADERS[kind]()
    for _ in range(2):  # persistent workers from the first pass would not record the second pass's indices
        batches = written(loader).batches
        assert len(batches) == len(list(loader))
        for number, (_, batch_idx, prediction, indices) in enumerate(batches):
            assert batch_idx == number
            assert type(indices) is list
            assert [10 * index for index in indices] == (prediction if isinstance(prediction, list) else [prediction])


def test_a_subset_counts_its_own_samples():
    batches = written(DataLoader(Subset(SAMPLES, [8, 6, 4]), batch_size=2)).batches
    assert batches == [(0, 0, [80, 60], [0, 1]), (0, 1, [40], [2])]


def test_an_epoch_has_a_list_for_each_loader():
    one = written(DataLoader(SAMPLES, batch_size=8), "epoch")
    assert not one.batches
    [(predictions, indices)] = one.epochs
    assert indices == [[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]]
    assert [batch.tolist() for batch in predictions] == [[10 * index for index in batch] for batch in indices[0]]
    several = written(
        [DataLoader(SAMPLES[:3], batch_size=2), DataLoader(SAMPLES, batch_size=4)],
        "batch_and_epoch",
        limit_predict_batches=2,
    )
    [(predictions, indices)] = several.epochs
    assert indices == [[[0, 1], [2]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert [[batch.tolist() for batch in loader] for loader in predictions] == [
        [[10 * index for index in batch] for batch in loader] for loader in indices
    ]
    assert [(loader, batch, indices) for loader, batch, _, indices in several.batches] == [
        (loader, number, batch) for loader, batches in enumerate(indices) for number, batch in enumerate(batches)
    ]


def test_what_predict_returns_does_not_change():
    trainer = quiet_trainer(callbacks=[Notes("epoch")])
    returned = trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=8))
    assert [batch.tolist() for batch in returned] == [SAMPLES[:8].tolist(), SAMPLES[8:].tolist()]
    assert trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=8), return_predictions=False) is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


class Batches:
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(SAMPLES.split(4))


class Reversed(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("kind", "loader"),
    [
        ("Batches", Batches()),
        ("DataLoader", DataLoader(Stream(), batch_size=4)),
        ("Reversed", Reversed(SAMPLES, batch_size=4)),
        ("DataLoader", DataLoader(SAMPLES, batch_size=4, num_workers=2, in_order=False)),
    ],
    ids=["no DataLoader", "stream", "own iterator", "any order"],
)
def test_none_where_nobody_can_know(kind, loader, caplog):
    say_once.cache_clear()
    writer = written([loader, DataLoader(SAMPLES, batch_size=8)], "batch_and_epoch")
    assert [indices for number, _, _, indices in writer.batches if number == 0] == [None, None, None]
    assert [len(indices) for number, _, _, indices in writer.batches if number == 1] == [8, 3]
    [(predictions, indices)] = writer.epochs
    assert indices[0] is None
    assert list(map(len, indices[1])) == [8, 3]
    assert list(map(len, predictions)) == [3, 2]
    said = [one.getMessage() for one in caplog.records if "batch_indices" in one.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"Notes gets batch_indices=None: this {kind} does not say which samples a batch has;")


def test_the_loader_stays_as_it_was():
    loader = DataLoader(SAMPLES, batch_size=4, num_workers=1, persistent_workers=True)
    sampler, before = loader.batch_sampler, dict(vars(loader))
    written(loader, "batch_and_epoch")
    assert loader.batch_sampler is sampler
    assert vars(loader) == before


class Looks(Callback):
    """Records the predict loop's attributes at the end of each batch and of the epoch."""

    def __init__(self):
        self.seen = []

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.look(trainer)

    def on_predict_epoch_end(self, trainer, pl_module):
        self.look(trainer)
        self.loaders = [feed._loader for _, feed in session(trainer).data._feeds]

    def look(self, trainer):
        loop = trainer.predict_loop
        self.seen.append((loop.current_batch_indices, len(loop.epoch_batch_indices), len(loop.predictions)))


def test_without_a_writer_nothing_is_noted():
    looks, loader = Looks(), DataLoader(SAMPLES, batch_size=8)
    quiet_trainer(callbacks=[looks]).predict(Repeats(), loader, return_predictions=False)
    assert looks.seen == [(None, 0, 0)] * 3
    assert looks.loaders[0] is loader
    trainer = quiet_trainer(callbacks=[Notes("epoch")], max_steps=1)
    trainer.fit(Classifier(), trained_on(), trained_on())
    assert session(trainer).predicted is None


def test_batches_that_are_written_one_by_one_are_not_kept():
    looks = Looks()
    trainer = quiet_trainer(callbacks=[looks, Notes("batch")])
    trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=8), return_predictions=False)
    assert looks.seen == [([0, 1, 2, 3, 4, 5, 6, 7], 1, 0), ([8, 9, 10], 1, 0), ([8, 9, 10], 1, 0)]
    trainer = quiet_trainer(callbacks=[looks := Looks(), Notes("epoch")])
    trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=8), return_predictions=False)
    assert [kept for _, _, kept in looks.seen] == [0, 1, 2]
    assert trainer.predict_loop.predictions == []  # the run's end frees the memory


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_a_method_that_is_missing_is_named_before_anything_is_predicted(interval):
    class Silent(Repeats):
        def predict_step(self, batch, batch_idx):
            raise AssertionError("predicted")

    name = "write_on_epoch_end" if interval == "epoch" else "write_on_batch_end"
    trainer = quiet_trainer(max_epochs=1, callbacks=[BasePredictionWriter(interval)])
    with pytest.raises(ConfigError, match=rf"write_interval='{interval}'\) calls {name}, which it does not have"):
        trainer.predict(Silent(), DataLoader(SAMPLES, batch_size=4))
    with pytest.raises(ConfigError, match="write_on_batch_end, which it does not have"):
        BasePredictionWriter().write_on_batch_end(None, None, None, None, None, 0, 0)
    trainer.fit(Classifier(), trained_on(8))  # a run without predictions checks no methods


def test_other_arguments_are_refused():
    with pytest.raises(ConfigError, match="Notes write_interval='epochs' is not known; did you mean 'epoch'"):
        Notes("epochs")
    with pytest.raises(UnknownArgumentError, match="BasePredictionWriter has no argument 'interval'"):
        BasePredictionWriter(interval="epoch")


def test_the_interval_is_lightnings():
    asked = [(BasePredictionWriter(one).interval.on_batch, BasePredictionWriter(one).interval.on_epoch)
             for one in ("batch", "epoch", "batch_and_epoch")]  # fmt: skip
    assert asked == [(True, False), (False, True), (True, True)]
    again = pickle.loads(pickle.dumps(Notes("epoch")))
    assert again.interval == "epoch"
    assert Notes(again.interval).interval.on_epoch


def test_the_loop_keeps_the_predictions_until_the_next_run():
    trainer = quiet_trainer(max_epochs=1)
    found = trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=4))
    assert trainer.predict_loop.predictions == found
    assert len(found) == 3
    trainer.fit(Classifier(), trained_on(8))
    assert trainer.predict_loop.predictions == []
