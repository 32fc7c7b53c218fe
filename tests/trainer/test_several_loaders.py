"""Validation, test and predict over one loader or several: which are kept apart, and what the Trainer shows of them."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError
from fabricamp.data import CombinedLoader
from tests.small import Classifier, loader, quiet_trainer


class Watched(Classifier):
    """Notes which batches of which loader it got, and logs what differs between loaders."""

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
    for given in collections:
        trainer.validate(Watched(), given, verbose=False)
        assert trainer.val_dataloaders == given
        trainer.test(Watched(), given, verbose=False)
        assert trainer.test_dataloaders == given
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
        """Fills a bank in validation, with which it trains."""

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
