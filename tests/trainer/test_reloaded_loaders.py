"""reload_dataloaders_every_n_epochs: loaders of their own for epochs, in runs that go on and on several ranks too."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer


class Reloads(Classifier):
    """Trains on more samples with each epoch, drawn anew for it, and notes when it was asked for them."""

    def __init__(self):
        super().__init__()
        self.asked, self.lengths, self.seen = [], [], []

    def _loader(self, name, size, **options):
        self.asked.append((name, self.current_epoch))
        chosen = torch.randperm(48)[:size].tolist()
        return DataLoader(Subset(data(48), chosen), batch_size=4, **options)

    def train_dataloader(self):
        return self._loader("train", 8 + 8 * self.current_epoch, shuffle=True)

    def val_dataloader(self):
        return self._loader("val", 4)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].sum())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.lengths.append(self.trainer.num_training_batches)


def fit(every, module=None, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = module or Reloads()
    trainer = quiet_trainer(reload_dataloaders_every_n_epochs=every, **{"max_epochs": 5, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize(
    ("every", "epochs", "lengths"),
    [(0, [0], [2] * 5), (1, [0, 1, 2, 3, 4], [2, 4, 6, 8, 10]), (2, [0, 2, 4], [2, 2, 6, 6, 10])],
)
def test_loaders_are_asked_for_as_lightning_does(every, epochs, lengths):
    _, module = fit(every)
    for name in ("train", "val"):
        assert [epoch for one, epoch in module.asked if one == name] == epochs
    assert module.lengths == lengths
    assert len(module.seen) == sum(lengths)


def test_shares_of_an_epoch_are_those_of_its_own_loader():
    class Validates(Reloads):
        at = ()

        def on_validation_start(self):
            self.at = (*self.at, self.trainer.global_step)

    _, module = fit(1, Validates(), max_epochs=3, val_check_interval=0.5, num_sanity_val_steps=0)
    assert module.at == (1, 2, 4, 6, 9, 12)


def test_loaders_that_were_given_stay():
    module = Classifier()
    trainer = quiet_trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    given = loader(16)
    trainer.fit(module, given, loader(8))
    assert trainer.global_step == 12
    assert trainer.train_dataloader.dataset is given.dataset


CUTS = [("O0", 1, 9, 1), ("O1", 2, 5, 1), ("O2", 1, 5, 2), ("O0", 1, 6, 2)]


def resumed(folder, precision, accumulation, step, every, **where):
    options = {"precision": precision, "accumulate_grad_batches": accumulation, **where}
    _, straight = fit(every, **options)
    cut, _ = fit(every, max_epochs=-1, max_steps=step, **options)
    cut.save_checkpoint(f"{folder}/cut.ckpt")
    _, again = fit(every, ckpt_path=f"{folder}/cut.ckpt", **options)
    seen = [float(one) for one in straight.seen[-len(again.seen) :]]
    same = all(torch.equal(one, two) for one, two in zip(straight.parameters(), again.parameters(), strict=True))
    return same, seen == [float(one) for one in again.seen], [float(one) for one in straight.seen]


@pytest.mark.parametrize(("precision", "accumulation", "step", "every"), CUTS)
def test_a_run_goes_on_bit_for_bit(tmp_path, precision, accumulation, step, every):
    assert resumed(tmp_path, precision, accumulation, step, every)[:2] == (True, True)


def test_ranks_share_each_loader(tmp_path):
    first, second = run_ranks(on_a_rank, 2, str(tmp_path))
    assert first[:2] == second[:2] == (True, True)
    assert len(first[2]) == len(second[2]) == 15
    assert not set(first[2]) & set(second[2])


def on_a_rank(folder):
    return resumed(folder, "O1", 1, 8, 1, strategy="ddp", devices="auto")


def test_checkpoints_and_profiles_take_the_loader_in_use(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    options = {"callbacks": checkpoint, "enable_checkpointing": True, "max_epochs": 3, "profiler": "simple"}
    trainer, straight = fit(1, logger=CSVLogger(tmp_path), **options)
    count = trainer.profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]
    assert len(count) >= trainer.global_step == 12
    for file in tmp_path.glob("*.ckpt"):
        _, again = fit(1, max_epochs=3, ckpt_path=file)
        assert all(torch.equal(one, two) for one, two in zip(straight.parameters(), again.parameters(), strict=True))
