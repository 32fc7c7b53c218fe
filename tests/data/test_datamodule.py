"""The DataModule's defaults."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp.data import DataModule
from fabricamp.errors import ConfigError


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
