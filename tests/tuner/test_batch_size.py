"""Tuner.scale_batch_size finds the largest size that fits into memory, and changes only the size."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError, DataModule, seed_everything
from fabricamp.callbacks import BatchSizeFinder
from fabricamp.tuner import Tuner
from tests.inside import settings
from tests.small import data, loader, quiet_trainer
from tests.tuner.modules import Tried, content


class Sized(DataModule):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.asked = []

    def train_dataloader(self):
        self.asked.append(self.size)
        return torch.utils.data.DataLoader(data(64), self.size, drop_last=True)


@pytest.mark.parametrize(
    ("options", "limit", "size"),
    [
        ({}, 13, 8),
        ({"mode": "binsearch", "margin": 0.0}, 13, 13),
        ({"mode": "binsearch", "margin": 0.25}, 13, 9),
        ({"mode": "binsearch", "margin": 0.0, "init_val": 40}, 13, 13),
        ({"init_val": 48}, 13, 12),
        ({"init_val": 5}, 13, 10),
        ({"init_val": 8}, 3, 2),
        ({"max_trials": 2}, 13, 4),
        ({"max_val": 6}, 13, 6),
        ({}, 10**9, 64),  # all samples fit into one batch
    ],
)
def test_finds_what_the_memory_takes(options, limit, size):
    module = Tried(limit=limit)
    module.sizes.append("before")
    found = Tuner(quiet_trainer()).scale_batch_size(module, steps_per_trial=1, **options)
    assert found == module.hparams.batch_size == size
    assert module.sizes == ["before"]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_finds_what_other_runs_take(method):
    module = Tried(limit=13)
    before = content(module)
    assert Tuner(quiet_trainer()).scale_batch_size(module, method=method, mode="binsearch", margin=0.0) == 13
    module.hparams.batch_size = 4
    assert content(module) == before


@pytest.mark.parametrize(
    ("level", "error"),
    [
        ("O0", RuntimeError("another")),
        ("O1", None),
        ("O2", None),
        ("O2", ZeroDivisionError("a bug")),
        ("bf16-true", None),
    ],
)
def test_only_the_size_is_changed(error, level):
    seed_everything(1)
    module, trainer = Tried(limit=13), quiet_trainer(precision=level, max_steps=2)
    before, state = content(module), torch.get_rng_state()
    before_search = repr(settings(trainer))
    if error is None:
        assert Tuner(trainer).scale_batch_size(module) == 8
        before["plain"][3]["batch_size"] = 8
    else:

        def on_train_batch_end(*_):
            if module.sizes[-1] == 8:
                raise error

        object.__setattr__(module, "on_train_batch_end", on_train_batch_end)
        with pytest.raises(type(error), match=str(error)):
            Tuner(trainer).scale_batch_size(module)
        del module.on_train_batch_end
    assert content(module) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert (repr(settings(trainer)), trainer.global_step) == (before_search, 0)
    trainer.fit(module)
    assert trainer.train_dataloader.batch_size == (4 if error else 8)


def test_in_a_data_module_and_by_another_name():
    module, held = Tried(limit=13), Sized(3)
    assert Tuner(quiet_trainer()).scale_batch_size(module, datamodule=held, batch_arg_name="size", init_val=3) == 12
    assert held.size == 12
    assert held.asked == [3, 6, 12, 24]
    assert module.hparams.batch_size == 4
    assert Tuner(quiet_trainer()).scale_batch_size(Tried(), held, batch_arg_name="size", init_val=48) == 64


def test_a_run_of_the_callback_and_one_that_resumes_it(tmp_path):
    def fit(module, ckpt_path=None, **options):
        seed_everything(1)
        trainer = quiet_trainer(callbacks=[BatchSizeFinder()], **options)
        trainer.fit(module, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "file.ckpt")
        return trainer

    straight, resumed = Tried(limit=13), Tried(limit=13)
    fit(straight, max_steps=6)
    fit(Tried(limit=13), max_steps=3)
    trainer = fit(resumed, tmp_path / "file.ckpt", max_steps=6)
    assert trainer.train_dataloader.batch_size == 8
    assert set(resumed.sizes) == {8}
    assert [one.tolist() for one in resumed.parameters()] == [one.tolist() for one in straight.parameters()]
    module = Tried(limit=13)
    quiet_trainer(callbacks=[BatchSizeFinder("binsearch", margin=0.0)]).validate(module, verbose=False)
    assert module.sizes == [13] * 4 + [12]


@pytest.mark.parametrize(
    ("module", "trainer", "arguments", "words"),
    [
        (Tried, {"devices": 2, "strategy": "delayed_ddp"}, {}, "2 .strategy 'delayed_ddp'.*devices=1"),
        (Tried, {}, {"train_dataloaders": loader()}, "write train_dataloader into Tried"),
        (Tried, {}, {"method": "test", "dataloaders": loader()}, "write test_dataloader into Tried"),
        (Tried, {}, {"batch_arg_name": "size"}, "has 'size'"),
        (Tried, {}, {"mode": "double"}, "known: 'power', 'binsearch'"),
        (Tried, {}, {"margin": 1.0}, "margin=1.0"),
        (Tried, {}, {"init_val": 0}, "init_val=0"),
        (Tried, {}, {"method": "train"}, "method='train' is not known"),
        (lambda: Tried(limit=0), {}, {}, "a batch of 1 sample is too large"),
    ],
)
def test_what_cannot_work_is_refused_by_name(module, trainer, arguments, words):
    with pytest.raises(ConfigError, match=words):
        Tuner(quiet_trainer(**trainer)).scale_batch_size(module(), **arguments)


def test_a_trial_run_has_no_search():
    module = Tried()
    assert Tuner(quiet_trainer(fast_dev_run=True)).scale_batch_size(module) is None
    assert module.hparams.batch_size == 4
