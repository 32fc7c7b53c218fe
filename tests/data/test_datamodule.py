"""The DataModule's defaults."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fabricamp.data import DataModule
from fabricamp.errors import CheckpointError, ConfigError
from tests.small import Classifier, loader, quiet_trainer


class Numbers(DataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(range(4), batch_size=self.hparams.batch_size)


def test_what_is_defined_works_and_what_is_not_is_named():
    data = Numbers(batch_size=4)
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 1
    for name in ("val", "test", "predict"):
        with pytest.raises(ConfigError, match=rf"Numbers does not define {name}_dataloader\(\)"):
            getattr(data, f"{name}_dataloader")()
    with pytest.raises(ConfigError, match=r"train_dataloader\(\)"):
        DataModule().train_dataloader()
    data.on_exception(KeyError())
    data.teardown("fit")


def test_defaults_move_the_batch_and_keep_no_state():
    data = Numbers()
    batch = {"x": torch.zeros(1)}
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert data.on_after_batch_transfer(batch, 0) is batch
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    assert data.transfer_batch_to_device(batch, torch.device("meta"), 0)["x"].is_meta
    assert data.state_dict() == {}
    data.load_state_dict({})
    assert data.trainer is None


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_loaders_of_datasets():
    data = Numbers.from_datasets(range(6), [range(3), range(2)], test_dataset=Endless(), batch_size=2)
    assert type(data) is Numbers
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    first, second = data.val_dataloader()
    assert ([*map(len, first)], [*map(len, second)]) == ([2, 1], [2])
    assert isinstance(first.sampler, SequentialSampler)
    assert len(list(data.test_dataloader())) == 2
    assert not first.persistent_workers
    named = DataModule.from_datasets({"a": range(6), "b": range(4)}, batch_size=2).train_dataloader()
    assert {name: len(one) for name, one in named.items()} == {"a": 3, "b": 2}
    assert DataModule.from_datasets(range(6), num_workers=2).train_dataloader().persistent_workers
    assert len(pickle.loads(pickle.dumps(data)).train_dataloader()) == 3
    with pytest.raises(ConfigError, match="does not define predict_dataloader"):
        data.predict_dataloader()
    assert Numbers.from_datasets(train_dataset=Endless(), batch_size=1).hparams.batch_size == 1  # as in Lightning


class Kept(DataModule):
    def __init__(self, size, folder: Path | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self):
        return loader(self.hparams.size)

    def state_dict(self):
        return {"seen": 5}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def test_built_from_a_checkpoint(tmp_path):
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Classifier(), datamodule=Kept(8, Path("a")))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    back = Kept.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert (back.hparams, back.seen) == ({"size": 8, "folder": Path("a")}, 5)
    assert Kept.load_from_checkpoint(tmp_path / "a.ckpt", size=3).hparams.size == 3
    (tmp_path / "hparams.yaml").write_text("size: 4")
    assert Kept.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "hparams.yaml").hparams.size == 4
    (tmp_path / "hparams.yaml").write_text("size: !!python/name:os.getcwd")
    with pytest.raises(CheckpointError, match=r"hparams_file='.*hparams.yaml' cannot be read.*plain values"):
        Kept.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "hparams.yaml")
