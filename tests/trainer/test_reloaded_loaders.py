"""reload_dataloaders_every_n_epochs: new loaders for later epochs, also in resumed runs and on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer


class Reloads(Classifier):
    """Returns a larger loader with new samples for each epoch, and records when it was asked for one."""

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


class Draws(Classifier):
    """Records a random number of each epoch's start with the epoch's samples; saves checkpoints in given hooks."""

    def __init__(self, saves=(), path=None):
        super().__init__()
        self.saves, self.path = saves, path
        self.notes = []

    def train_dataloader(self):
        return loader(8, 2, shuffle=True)

    def save(self, place):
        if (place, self.current_epoch) in self.saves:
            self.trainer.save_checkpoint(self.path / f"{place}.ckpt")

    def on_train_epoch_start(self):
        self.save("start")
        self.notes.append([self.current_epoch, torch.rand(()).item()])

    def training_step(self, batch, batch_idx):
        self.notes[-1].append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.save("within")

    def on_train_epoch_end(self):
        self.save("end")


def plain_loop(epochs, every):
    """Draws as Lightning 2.6.6 does, which begins a pass over new loaders, drops it, and then calls the start hooks."""
    notes = []
    for epoch in range(epochs):
        if epoch and epoch % every == 0:
            iter(loader(8, 2, shuffle=True))
        notes.append([epoch, torch.rand(()).item()])
        notes[-1] += [batch[0].sum().item() for batch in loader(8, 2, shuffle=True)]
    return notes


@pytest.mark.parametrize("every", [1, 2, 3])
def test_draws_and_orders_are_lightnings_where_loaders_are_new(tmp_path, every):
    module = Draws()
    torch.manual_seed(1)
    run = quiet_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every, default_root_dir=tmp_path)
    run.fit(module)
    torch.manual_seed(1)
    assert module.notes == plain_loop(4, every)


@pytest.mark.parametrize(
    ("place", "epoch", "done"), [("start", 2, 0), ("within", 2, 2), ("end", 2, 4), ("epoch=2", 3, 0)]
)
def test_a_resumed_run_draws_no_number_of_a_reload_twice(tmp_path, place, epoch, done):
    options = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 1, "default_root_dir": tmp_path}
    straight, resumed = Draws(saves=[(place, 2)], path=tmp_path), Draws()
    torch.manual_seed(1)
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)  # after each epoch
    quiet_trainer(**options, callbacks=[saving], enable_checkpointing=True).fit(straight)
    torch.manual_seed(7)
    quiet_trainer(**options).fit(resumed, ckpt_path=tmp_path / f"{place}.ckpt")
    if done:  # the epoch's start hook is called again, and draws another number
        assert resumed.notes[0][2:] == straight.notes[epoch][2 + done :]
        assert resumed.notes[1:] == straight.notes[epoch + 1 :]
    else:
        assert resumed.notes == straight.notes[epoch:]


class NotesEpochs(torch.utils.data.SequentialSampler):
    def __init__(self, dataset):
        super().__init__(dataset)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_samplers_of_a_validation_get_the_epoch(tmp_path):
    sampler = NotesEpochs(data(8))
    validation = DataLoader(data(8), batch_size=4, sampler=sampler)
    run = quiet_trainer(max_epochs=2, num_sanity_val_steps=1, default_root_dir=tmp_path)
    run.fit(Classifier(), loader(8), validation)
    run.validate(Classifier(), validation, verbose=False)
    assert sampler.epochs == [0, 0, 1, 2]
