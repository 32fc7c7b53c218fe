"""Validation, test and predict over one loader or several: which are kept separate, and the Trainer's attributes for them."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler

from fabricamp import ConfigError
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.data import CombinedLoader
from tests.small import Classifier, loader, quiet_trainer


class Watched(Classifier):
    """Records its batches by loader, and logs values that differ between loaders."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((batch_idx, dataloader_idx))
        self.log("v", float(dataloader_idx))

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch_idx, dataloader_idx


class Pair(Classifier):
    """Trains on the first of two loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


def two(mode):
    return CombinedLoader({"near": loader(8), "far": loader(4)}, mode)


def test_a_sequential_combined_loader_is_several_loaders():
    module, trainer = Watched(), quiet_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, loader(4), two("sequential"))
    assert module.seen == [(0, 0), (1, 0), (0, 1)]
    assert (trainer.callback_metrics["v/dataloader_idx_0"], trainer.callback_metrics["v/dataloader_idx_1"]) == (0, 1)
    assert trainer.num_val_batches == [2, 1]
    assert trainer.test(module, two("sequential"), verbose=False) == [
        {"v/dataloader_idx_0": 0.0},
        {"v/dataloader_idx_1": 1.0},
    ]
    assert trainer.predict(module, two("sequential")) == [[(0, 0), (1, 0)], [(0, 1)]]


def test_another_mode_is_one_loader():
    module = Watched()
    assert quiet_trainer().validate(module, two("max_size"), verbose=False) == [{"v": 0.0}]
    assert module.seen == [(0, 0), (1, 0)]


def test_loaders_are_shown_in_the_collection_that_they_came_in():
    one, other = loader(8), loader(4)
    collections = [one, [one], {"a": one}, {"a": [one, other], "b": other}]
    trainer = quiet_trainer(max_epochs=1)
    for collection in collections:
        trainer.validate(Watched(), collection, verbose=False)
        assert trainer.val_dataloaders == collection
        trainer.test(Watched(), collection, verbose=False)
        assert trainer.test_dataloaders == collection
        assert trainer.val_dataloaders is None
    trainer.validate(Watched(), CombinedLoader([one, other], "min_size"), verbose=False)
    assert trainer.val_dataloaders == [one, other]
    trainer.fit(Pair(), {"a": one, "b": other})
    assert [trainer.train_dataloader[name].dataset for name in "ab"] == [one.dataset, other.dataset]


def test_an_empty_collection_is_no_loader():
    class Empty(Watched):
        def val_dataloader(self):
            return []

    for module, val in ((Empty(), None), (Watched(), []), (Watched(), {})):
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(module, loader(4), val)
        assert (module.seen, trainer.val_dataloaders) == ([], None)
    with pytest.raises(ConfigError, match="nothing to test"):
        quiet_trainer().test(Watched(), [], verbose=False)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_what_validation_keeps_within_fit_can_be_trained_with(inference_mode):
    class Bank(Watched):
        """Fills a memory bank in validation and uses it in training."""

        bank = None

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.bank is None else loss + (self.net(batch[0]) * self.bank).mean()

        def validation_step(self, batch, batch_idx):
            assert not torch.is_grad_enabled()
            self.bank = self.net(batch[0])

    module = Bank()
    quiet_trainer(max_epochs=2, inference_mode=inference_mode).fit(module, loader(8), loader(4))
    assert not module.bank.is_inference()
    quiet_trainer(inference_mode=inference_mode).validate(module, loader(4), verbose=False)
    assert module.bank.is_inference() == inference_mode


class Drawing:
    """A user's loader that draws its order at the beginning of a pass."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size).split(1))


def of_kind(kind, size):
    samples = range(size)
    return {
        "in order": lambda: DataLoader(samples),
        "shuffled": lambda: DataLoader(samples, shuffle=True),
        "own generator": lambda: DataLoader(samples, shuffle=True, generator=torch.Generator().manual_seed(7)),
        "another sampler": lambda: DataLoader(samples, sampler=SubsetRandomSampler(samples)),
        "another loader": lambda: Drawing(size),
    }[kind]()


class SeesAndFails(Classifier):
    """Records its batches; raises in the batch after ``fails`` steps: before its step, in it or after it."""

    def __init__(self, fails=None, place=""):
        super().__init__()
        self.seen, self.fails, self.place = [], fails, place

    def fail_at(self, place):
        if self.place == place and self.global_step == self.fails:
            raise ValueError(place)

    def on_train_batch_start(self, batch, batch_idx):
        self.fail_at("start")

    def training_step(self, batch, batch_idx):
        self.seen.append(str(batch))
        self.fail_at("step")
        return self.net(torch.ones(1, 8)).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.fail_at("end")


@settings(deadline=None, max_examples=6)
@given(
    loaders=st.lists(
        st.tuples(
            st.sampled_from(["in order", "shuffled", "own generator", "another sampler", "another loader"]),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=3,
    ),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size", "sequential"]),
    place=st.sampled_from(["start", "step", "end"]),
    limit=st.sampled_from([None, 1, 3]),
)
@example([("shuffled", 3), ("in order", 5)], "max_size_cycle", "step", None)
@example([("another loader", 2), ("in order", 5)], "max_size_cycle", "start", None)
@example([("own generator", 3), ("in order", 2)], "sequential", "step", None)
@example([("another sampler", 3)], "max_size", "step", None)
def test_a_combination_that_an_exception_cut_goes_on_in_its_order(loaders, mode, place, limit):
    """Also at the first batch of an epoch, or of a shorter loader's next round, when the order is already drawn."""

    def fit(module, keeper=None, ckpt_path=None):
        combined = CombinedLoader({number: of_kind(*one) for number, one in enumerate(loaders)}, mode)
        torch.manual_seed(3)
        trainer = quiet_trainer(
            max_epochs=2, limit_train_batches=limit, callbacks=keeper, enable_checkpointing=keeper is not None
        )
        trainer.fit(module, combined, ckpt_path=ckpt_path)

    straight = SeesAndFails()
    fit(straight)
    for fails in range(1, len(straight.seen)):
        with tempfile.TemporaryDirectory() as folder:
            keeper = ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=100)
            with pytest.raises(ValueError, match=place):
                fit(SeesAndFails(fails, place), keeper)
            resumed = SeesAndFails()
            fit(resumed, ckpt_path=keeper.last_model_path)
        assert resumed.seen == straight.seen[fails:]
