"""Where the time of a fit goes: slow data are told once, with what helps, and a long fit ends with its shares."""

from __future__ import annotations

import logging
import os
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.data import CombinedLoader
from fabricamp.engine.report import time_spent
from fabricamp.engine.report.time_spent import TimeSpent, what_helps
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer


class Slow(Dataset):
    """Takes ``seconds`` for each sample."""

    def __init__(self, seconds, samples):
        self.samples, self.seconds = data(samples), seconds

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.samples[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(8))


class Busy(Classifier):
    """Takes time for a step, a validation batch and a checkpoint."""

    def __init__(self, step=0.0, validation=0.0, save=0.0, setup=0.0):
        super().__init__()
        self.seconds = {"step": step, "validation": validation, "save": save, "setup": setup}

    def setup(self, stage):
        time.sleep(self.seconds["setup"])

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds["step"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(self.seconds["validation"])
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        time.sleep(self.seconds["save"])


def told(caplog):
    return [line for line in caplog.messages if "waits for data" in line]


def fit(module, train, **options):
    trainer = quiet_trainer(**{"enable_progress_bar": True, "max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(module, train, loader(8))
    return trainer


class Looks(Callback):
    """Notes the step after which the line is there."""

    def __init__(self, caplog):
        self.caplog, self.step = caplog, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.step is None and told(self.caplog):
            self.step = trainer.global_step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_slow_data_are_told_once_after_fifty_steps(accumulate, caplog):
    looks = Looks(caplog)
    train = DataLoader(Slow(0.025 / accumulate, 60 * accumulate))
    fit(Busy(), train, callbacks=[looks], accumulate_grad_batches=accumulate, max_epochs=2)
    (line,) = told(caplog)
    assert re.fullmatch(
        r"\d\d %.*: give the train loader num_workers=\d \(now 0\); more: fabricamp help slow-data", line
    )
    assert looks.step == (51 if accumulate == 1 else 50)  # the hook of the batch after the one with which step 50 ends


@pytest.mark.parametrize(
    ("options", "step", "sample"),
    [
        ({"enable_progress_bar": False}, 0.0, 0.025),
        ({"fast_dev_run": 55}, 0.0, 0.025),
        ({}, 0.04, 0.025),
        ({}, 0.0, 0.0),
        ({"max_steps": 49}, 0.0, 0.025),
    ],
    ids=["silent", "fast_dev_run", "slow steps", "a second is not lost", "too short"],
)
def test_nothing_is_told(options, step, sample, caplog):
    fit(Busy(step=step), DataLoader(Slow(sample, 55)), **options)
    assert told(caplog) == []


def test_a_slow_first_batch_is_no_slow_loader(caplog):
    class SlowFirst(Slow):
        def __getitem__(self, index):
            time.sleep(2.0 if index == 0 else 0.0)
            return self.samples[index]

    fit(Busy(step=0.002), DataLoader(SlowFirst(0.0, 60)))
    assert told(caplog) == []


def with_workers(dataset, workers, **options):
    return DataLoader(dataset, num_workers=workers, **options)


@pytest.mark.parametrize(
    ("train", "at_epochs", "words"),
    [
        (DataLoader(Slow(0, 4)), False, "give the train loader num_workers=4 (now 0)"),
        (with_workers(Slow(0, 4), 1), False, "give the train loader num_workers=4 (now 1)"),
        (with_workers(Slow(0, 4), 1), True, "persistent_workers=True keeps the train loader's workers"),
        (with_workers(Slow(0, 4), 4, persistent_workers=True), True, "4 workers of the train loader are too slow"),
        (DataLoader(Stream()), False, "num_workers=4 (now 0), each of which reads its part of the stream"),
        (DataLoader(TensorDataset(torch.ones(4, 1))), False, "give ResidentLoader(*tensors, batch_size=...)"),
        ([torch.ones(2, 1)], False, "let a DataLoader with num_workers read ahead"),
        (CombinedLoader([loader(8), DataLoader(Slow(0, 4))]), False, "give the train loader num_workers=4 (now 0)"),
    ],
)
def test_the_word_that_helps_fits_the_loader(train, at_epochs, words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert words in what_helps(train, at_epochs=at_epochs)


def test_one_core_has_no_room_for_workers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "no core for workers" not in what_helps(DataLoader(Slow(0, 4)), at_epochs=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "no core for workers" in what_helps(DataLoader(Slow(0, 4)), at_epochs=False)


def shares(line):
    assert re.fullmatch(r"[\d.:]+ s? ?in all: .*", line), line
    return {name: int(share) for name, share in re.findall(r"(\w+) (\d+) %", line)}


def verdict(caplog):
    return [line for line in caplog.messages if " in all: " in line]


def test_a_long_fit_ends_with_the_shares_of_its_time(caplog, monkeypatch):
    monkeypatch.setattr(time_spent, "_VERDICT_SECONDS", 0.5)
    module = Busy(step=0.05, validation=0.5, save=0.5, setup=0.5)
    # Saves at the end of a validation, within its time: each is counted as one of them alone.
    keeps = ModelCheckpoint("kept", monitor="val_loss")
    fit(
        module,
        DataLoader(Slow(0.1, 11)),
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[keeps],
        enable_checkpointing=True,
    )
    *_, line, end = caplog.messages
    found = shares(line)
    assert end.startswith("Ended at step 11")
    assert 95 <= sum(found.values()) <= 105
    # 1 s of data (and the first batch in the start), 0.55 s of steps, 0.5 s each of the others; a busy machine adds to any.
    assert 10 <= found["validation"] <= 25
    assert 10 <= found["saves"] <= 25
    assert found["data"] >= 20
    assert 12 <= found["steps"] <= 40
    assert 10 <= found["start"] <= 40


class SlowModel(Busy):
    def configure_optimizers(self):
        time.sleep(0.7)
        return super().configure_optimizers()


def test_a_start_that_takes_longest_says_what_it_was(caplog, monkeypatch):
    monkeypatch.setattr(time_spent, "_VERDICT_SECONDS", 0.1)
    module = SlowModel(step=0.02, validation=0.5, setup=0.9)
    fit(module, DataLoader(Slow(0.3, 8), batch_size=1), limit_val_batches=1, max_steps=2)
    (line,) = verdict(caplog)
    parts = re.search(r"in all: start \d+ % \(([^)]*)\)", line)[1]
    seconds = {name.strip(): float(took) for name, took in re.findall(r"([a-z_ ]+) (\d+\.\d) s", parts)}
    least = {"prepare_data and setup": 0.9, "model and optimizers": 0.7, "sanity check": 0.5, "the first batch": 0.3}
    assert seconds.keys() == least.keys()
    assert all(seconds[name] >= least[name] for name in least)
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


def test_a_start_that_is_short_says_no_parts(caplog, monkeypatch):
    monkeypatch.setattr(time_spent, "_VERDICT_SECONDS", 0.1)
    fit(SlowModel(step=0.4), loader(64), max_steps=4)
    assert re.search(r"in all: steps \d+ %, start \d+ %", verdict(caplog)[0])


@pytest.mark.parametrize(
    "options", [{"enable_progress_bar": False}, {"fast_dev_run": 4}, {"max_steps": 0}], ids=lambda one: next(iter(one))
)
def test_a_silent_fit_has_no_verdict_nor_one_without_training(options, caplog, monkeypatch):
    monkeypatch.setattr(time_spent, "_VERDICT_SECONDS", 0.05)
    fit(Busy(step=0.02), loader(16), **options)
    assert verdict(caplog) == []


def test_a_short_fit_has_none(caplog):
    fit(Busy(), loader(16))
    assert verdict(caplog) == []


def two_ranks():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    time_spent._VERDICT_SECONDS = 0.05
    fit(Busy(step=0.02), loader(32), devices="auto", strategy="ddp")
    return [line for line in lines if " in all: " in line]


def test_rank_0_tells_its_own_shares():
    first, second = run_ranks(two_ranks, 2)
    (line,) = first
    assert line.endswith("(rank 0)")
    assert second == []


def test_a_part_within_a_part_is_counted_once():
    spent = TimeSpent()
    with spent.part("validation"):
        time.sleep(0.05)
        with spent.part("saves"):
            time.sleep(0.2)
        with spent.part("saves"):
            time.sleep(0.2)
    assert spent._parts["saves"] >= 0.4
    assert 0.05 <= spent._parts["validation"] < 0.3


def test_no_batch_stays_in_memory_while_the_next_is_read():
    alive = []

    class Batch:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    def batches():
        for _ in range(3):
            assert not alive
            yield Batch()

    reading = TimeSpent().reading(batches())
    for batch in reading:
        del batch
