"""``overfit_batches``: training and validation use the same few batches in each epoch, also of a shuffled loader."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from fabricamp import ConfigError, DataModule, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.data import CombinedLoader, LengthGroups, ResidentLoader
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

SIZE = 20


class Seen(TrainingModule):
    """Records the samples of each step by epoch, and of each validation."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated = {}, []

    def training_step(self, batch, batch_idx):
        self.trained.setdefault(self.current_epoch, []).append(listed(batch))
        return self.weight.sum()

    def on_validation_start(self):
        self.validated.append([])

    def validation_step(self, batch, batch_idx):
        self.validated[-1].append(listed(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def listed(batch):
    if isinstance(batch, dict):
        return {name: listed(one) for name, one in batch.items()}
    return (batch[0] if isinstance(batch, list | tuple) else batch).tolist()


def shuffled(size=SIZE, batch_size=4, **options):
    return DataLoader(torch.arange(size), batch_size=batch_size, shuffle=True, **options)


def in_order(batches, size=SIZE, batch_size=4):
    return [list(range(size))[start : start + batch_size] for start in range(0, batches * batch_size, batch_size)]


def fit(loader, overfit=2, *, epochs=3, module=None, ckpt_path=None, **options):
    module = module or Seen()
    trainer = quiet_trainer(max_epochs=epochs, overfit_batches=overfit, num_sanity_val_steps=1, **options)
    trainer.fit(module, loader, DataLoader(torch.arange(100, 120), batch_size=5), ckpt_path=ckpt_path)
    return module


def check_same(module, expected=None, epochs=3):
    """Checks that every epoch trained on the batches that it validated on, and all epochs on the same."""
    validated = module.validated[1:]  # without the sanity check
    assert [*module.trained.values()] == validated
    assert validated == [validated[0]] * epochs
    assert module.validated[0] == validated[0][:1]
    if expected is not None:
        assert validated[0] == expected


@pytest.mark.parametrize(("overfit", "batches"), [(1, 1), (2, 2), (0.4, 2), (0.99, 4), (1.0, 5), (100, 5)])
def test_a_shuffled_loader_is_read_in_order_by_both(overfit, batches):
    check_same(fit(shuffled(), overfit), in_order(batches))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True},
        {"generator": torch.Generator().manual_seed(5)},
        {"drop_last": True},
    ],
)
def test_whatever_options_the_loader_has(options):
    check_same(fit(shuffled(19, **options), 0.5), in_order(2, 19))


def test_within_an_epoch_and_with_seeded_samples():
    module = fit(shuffled(), 4, val_check_interval=2, per_sample_seed=True)
    assert [*module.trained.values()] == [in_order(4)] * 3
    assert module.validated[1:] == [in_order(4)] * 6


def test_augmented_samples_are_those_of_the_epochs_steps():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            return torch.rand(()) + index

    module = fit(DataLoader(Noisy(), batch_size=4, shuffle=True), per_sample_seed=True)
    assert [*module.trained.values()] == module.validated[1:]
    assert module.validated[1] != module.validated[2], "each epoch draws its own"


def test_a_datamodule_that_makes_its_data_is_asked_once():
    class Made(DataModule):
        asked = 0

        def train_dataloader(self):
            self.asked += 1
            return DataLoader(torch.randperm(SIZE), batch_size=4, shuffle=True)

        def val_dataloader(self):
            return DataLoader(torch.arange(100, 120), batch_size=5)

    data, module = Made(), Seen()
    quiet_trainer(max_epochs=3, overfit_batches=2, num_sanity_val_steps=1).fit(module, datamodule=data)
    check_same(module)
    assert data.asked == 1
    again, module = Made(), Seen()
    quiet_trainer(max_epochs=3, overfit_batches=2, reload_dataloaders_every_n_epochs=1).fit(module, datamodule=again)
    assert [*module.trained.values()] == module.validated[1:]
    assert module.validated[1] != module.validated[2], "each epoch has data of its own"
    assert again.asked == 3


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "sequential"])
@pytest.mark.parametrize("overfit", [3, 0.5])
def test_validation_gets_the_combined_batches_of_the_steps(mode, overfit):
    check_same(fit(CombinedLoader({"a": shuffled(6, 2), "b": shuffled(30, 3)}, mode), overfit))


def test_a_bare_collection_too():
    module = fit({"a": shuffled(4, 2), "b": shuffled(30, 3)}, 3)
    a, b = in_order(2, 4, 2), in_order(3, 30, 3)
    check_same(module, [{"a": a[index % 2], "b": b[index]} for index in range(3)])


def test_a_sampler_of_its_own_gives_way_to_the_order_of_the_dataset(caplog):
    for sampler in (
        WeightedRandomSampler([1.0] * SIZE, SIZE),
        DistributedSampler(range(SIZE), 1, 0),
        RandomSampler(range(7)),
    ):
        caplog.clear()
        check_same(fit(DataLoader(torch.arange(SIZE), batch_size=4, sampler=sampler)), in_order(2))
        assert f"in the order of its dataset, without its {type(sampler).__name__}" in caplog.text
    batches = BatchSampler(WeightedRandomSampler([1.0] * SIZE, SIZE), 4, drop_last=False)
    check_same(fit(DataLoader(torch.arange(SIZE), batch_sampler=batches)), in_order(2))


class Batches(BatchSampler):
    """A batch sampler with an unknown order."""


class OwnLoader(DataLoader):
    pass


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (
            lambda: DataLoader(torch.arange(SIZE), batch_sampler=Batches(RandomSampler(range(SIZE)), 4, False)),
            "Batches",
        ),
        (lambda: OwnLoader(torch.arange(SIZE), batch_size=4, shuffle=True), "OwnLoader with Tensor with RandomSampler"),
        (
            lambda: DataLoader(torch.arange(SIZE), batch_sampler=LengthGroups([1] * SIZE, batch_size=4)),
            r"LengthGroups\(shuffle=True\)",
        ),
    ],
)
def test_what_may_shuffle_and_cannot_be_rebuilt_is_refused(loader, words):
    with pytest.raises(ConfigError, match=rf"overfit_batches=2.*{words}.*shuffle=False"):
        fit(loader())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(SIZE))


def test_what_comes_in_one_order_is_taken_as_it_is(caplog):
    check_same(fit(OwnLoader(torch.arange(SIZE), batch_size=4)), in_order(2))
    check_same(fit(DataLoader(Stream(), batch_size=4)), in_order(2))
    check_same(fit(ResidentLoader(torch.arange(SIZE), batch_size=4, shuffle=True)), in_order(2))
    groups = LengthGroups([1] * SIZE, batch_size=4, shuffle=False)
    check_same(fit(DataLoader(torch.arange(SIZE), batch_sampler=groups)), in_order(2))
    check_same(fit(DataLoader(torch.arange(SIZE), batch_size=4, sampler=SequentialSampler(range(SIZE)))), in_order(2))
    check_same(fit([*torch.arange(SIZE).split(4)]), in_order(2))
    assert "DataLoader is used as it is" in caplog.text
    assert "list is used as it is" not in caplog.text


def test_a_loader_whose_order_is_not_known_is_reported(caplog):
    class Drawn:
        """Yields other samples in each pass."""

        passes = 0

        def __len__(self):
            return 5

        def __iter__(self):
            self.passes += 1
            return iter(torch.arange(SIZE).add(100 * self.passes).split(4))

    fit(Drawn())
    assert (
        "Drawn is used as it is, in its own order; its first batches are the same in each epoch only if" in caplog.text
    )


@pytest.mark.parametrize("overfit", [2, 0.4])
def test_a_fit_that_goes_on_sees_the_same(overfit, tmp_path):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    check_same(fit(shuffled(), overfit, enable_checkpointing=True, callbacks=save), in_order(2))
    for step in (2, 3):  # between two epochs, and within one
        resumed = fit(shuffled(), overfit, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert [batch for epoch in resumed.trained.values() for batch in epoch] == (in_order(2) * 3)[step:]
        assert resumed.validated == [in_order(2)] * (3 if step == 2 else 2)


def test_a_validation_of_its_own_takes_the_loader_that_it_is_given():
    module = Seen()
    trainer = quiet_trainer(max_epochs=1, overfit_batches=2, logger=False)
    trainer.validate(module, shuffled(), verbose=False)
    assert len(module.validated[0]) == 2


@pytest.mark.parametrize("overfit", [2, 0.5, 1.0])
def test_each_of_two_ranks_validates_its_own_share_of_the_training(overfit):
    def ranks():
        rank = int(os.environ["RANK"])
        found = [
            fit(shuffled(19, 3), overfit, devices="auto"),
            fit({"a": shuffled(4, 2), "b": shuffled(19, 3)}, overfit, devices="auto"),
            fit(
                DataLoader(torch.arange(19), batch_size=3, sampler=DistributedSampler(range(19), 2, rank)),
                overfit,
                devices="auto",
            ),
        ]
        for module in found:
            check_same(module)
        return [one.validated[1] for one in found]

    first, second = run_ranks(ranks, 2, backend=None)
    assert first[0][:2] == [[0, 2, 4], [6, 8, 10]]
    assert second[0][:2] == [[1, 3, 5], [7, 9, 11]]
    assert (first[2], second[2]) == (first[0], second[0])
    if overfit == 1.0:
        assert second[0][-1] == [0], "who has a sample less takes the first again, as in training"
