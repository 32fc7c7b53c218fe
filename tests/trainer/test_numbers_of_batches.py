"""The numbers of batches, read in and after each entry point, equal those of Lightning's Trainer."""

from __future__ import annotations

import math

import torch
from torch.utils.data import DataLoader

from fabricamp import TrainingModule
from fabricamp.tuner import Tuner
from tests.small import quiet_trainer

NAMES = ("num_training_batches", "num_sanity_val_batches", "num_val_batches", "num_test_batches", "num_predict_batches")


class Counted(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.lr = 0.1

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return numbers(self.trainer)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches(number):
    return DataLoader(torch.zeros(number, 1))


def numbers(trainer):
    return [getattr(trainer, name) for name in NAMES]


def check_all_entry_points(trainer):
    """Compares with the rows of Lightning 2.6."""
    assert numbers(trainer) == [math.inf, [], [], [], []]
    module = Counted()
    trainer.validate(module, batches(2), verbose=False)
    assert numbers(trainer) == [math.inf, [], [2], [], []]
    trainer.fit(module, batches(6), [batches(3), batches(3), batches(1)])
    assert numbers(trainer) == [6, [1, 1, 1], [3, 3, 1], [], []]
    trainer.test(module, batches(4), verbose=False)
    assert numbers(trainer) == [6, [1, 1, 1], [3, 3, 1], [4], []]
    trainer.validate(module, [batches(2), batches(1)], verbose=False)
    assert numbers(trainer) == [6, [1, 1, 1], [2, 1], [4], []]
    predicted = trainer.predict(module, batches(2))
    assert numbers(trainer) == [6, [1, 1, 1], [3, 3, 1], [4], [2]]
    return predicted, module


def test_those_of_the_last_run_of_each_kind_stay_known():
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=1)
    predicted, module = check_all_entry_points(trainer)
    assert predicted == [[6, [1, 1, 1], [3, 3, 1], [4], [2]]] * 2
    Tuner(trainer).lr_find(module, batches(8), num_training=3)
    assert numbers(trainer) == [6, [1, 1, 1], [3, 3, 1], [4], [2]], "a search is no fit"


def test_workers_know_them_and_bring_them_back():
    trainer = quiet_trainer(
        max_epochs=1, num_sanity_val_steps=1, devices=2, start_method="fork", use_distributed_sampler=False
    )
    predicted, _ = check_all_entry_points(trainer)
    assert predicted == [[6, [1, 1, 1], [3, 3, 1], [4], [2]]] * 4
