"""``validate``, ``test`` and ``predict`` after a fit, without a module: the best weights are loaded, as in Lightning."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import OptLevel, Trainer, TrainingModule
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.errors import MissingCheckpointError
from tests.small import QUIET, quiet_trainer

SCORES = [2.0, 1.0, 3.0]
"""The score that each epoch logs; the second epoch is the best."""


class Scored(TrainingModule):
    """A weight that grows by 1 in each epoch; ``test`` and ``validate`` log it, ``predict`` returns it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return -self.weight.sum()

    def on_train_epoch_end(self):
        self.log("score", SCORES[self.current_epoch])

    def validation_step(self, batch, batch_idx):
        self.log("val_weight", self.weight[0].float())

    def test_step(self, batch, batch_idx):
        self.log("test_weight", self.weight[0].float())

    def predict_step(self, batch, batch_idx):
        return float(self.weight[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches():
    return DataLoader(torch.zeros(1, 1))


def fitted(folder, *, callbacks=(), kind=ModelCheckpoint, **options):
    """A Trainer and its module after three epochs of one step each; the best file has the weight 2, the last weights are 3."""
    checkpoints = [kind(folder, "{epoch}", "score", save_last=True)] if kind is not None else []
    trainer = quiet_trainer(
        **{"max_epochs": 3, "enable_checkpointing": kind is not None, "callbacks": [*checkpoints, *callbacks]} | options
    )
    module = Scored()
    trainer.fit(module, batches())
    return trainer, module


def evaluated(trainer, name, *given, **options):
    """Returns the weight that the entry point used."""
    if name == "predict":
        return trainer.predict(*given, dataloaders=batches(), **options)[0]
    key = {"validate": "val_weight", "test": "test_weight"}[name]
    return getattr(trainer, name)(*given, dataloaders=batches(), verbose=False, **options)[0][key]


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_the_best_weights_are_loaded_into_the_module_which_keeps_them(name, tmp_path):
    trainer, module = fitted(tmp_path)
    assert module.weight.tolist() == [3, 3]
    assert evaluated(trainer, name) == 2
    assert trainer.ckpt_path == str(tmp_path / "epoch=1.ckpt")
    assert module.weight.tolist() == [2, 2]
    assert trainer.module is module
    assert evaluated(trainer, name, module) == 2, "the module that is given is taken as it is"
    assert trainer.ckpt_path is None


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_a_module_or_a_path_takes_other_weights(name, tmp_path):
    trainer, module = fitted(tmp_path)
    assert evaluated(trainer, name, module) == 3
    assert evaluated(trainer, name, ckpt_path="last") == 3
    assert evaluated(trainer, name, ckpt_path="best") == 2
    assert evaluated(trainer, name, ckpt_path=tmp_path / "last.ckpt") == 3


@pytest.mark.parametrize("bar", [False, True])
def test_one_line_names_the_file(bar, tmp_path, caplog, capfd):
    trainer, _ = fitted(tmp_path, enable_progress_bar=bar)
    capfd.readouterr()
    caplog.clear()  # the fit names the file too
    with caplog.at_level(logging.INFO, "fabricamp"):
        evaluated(trainer, "test")
    lines = [line for line in caplog.messages if "epoch=1.ckpt" in line]
    assert len(lines) == 1
    assert "epoch=1.ckpt" not in capfd.readouterr().out
    assert "step 2" in lines[0]
    assert "ckpt_path='last'" in lines[0]


def test_without_a_monitor_it_is_the_newest_file(tmp_path):
    trainer, module = fitted(tmp_path, kind=lambda folder, *_, **__: ModelCheckpoint(folder))
    with torch.no_grad():
        module.weight.fill_(7)
    assert evaluated(trainer, "test") == 3


def test_of_several_the_first_callback_says_which(tmp_path):
    trainer, _ = fitted(tmp_path / "a", callbacks=[ModelCheckpoint(tmp_path / "b", "{epoch}", "score", mode="max")])
    assert evaluated(trainer, "test") == 2


class NeverDue(ModelCheckpoint):
    def __init__(self, folder, *_, **__):
        super().__init__(folder, every_n_train_steps=100)


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (None, {}, "this Trainer has no ModelCheckpoint"),
        (NeverDue, {}, "NeverDue has saved no best"),
        (ModelCheckpoint, {"fast_dev_run": True}, "fast_dev_run=1 saves none"),
    ],
)
def test_where_there_is_none_a_value_error_names_the_ways_out(name, kind, options, why, tmp_path):
    trainer, module = fitted(tmp_path, kind=kind, **options)
    before = module.weight.tolist()
    with pytest.raises(ValueError, match=why) as caught:
        evaluated(trainer, name)
    assert isinstance(caught.value, MissingCheckpointError)
    assert f"trainer.{name}() without a module" in str(caught.value)
    assert f"trainer.{name}(module)" in str(caught.value)
    assert "ckpt_path='last'" in str(caught.value)
    assert module.weight.tolist() == before
    assert evaluated(trainer, name, module) == before[0], "the Trainer goes on to be used"


def test_the_best_by_name_is_a_value_error_too_where_there_is_none(tmp_path):
    trainer, module = fitted(tmp_path, kind=None)
    with pytest.raises(ValueError, match="has no ModelCheckpoint"):
        trainer.test(module, batches(), ckpt_path="best")


def test_before_any_run_there_is_no_module_to_load_into():
    with pytest.raises(ValueError, match="test got NoneType"):
        Trainer(**QUIET).test(dataloaders=batches())


def test_what_is_written_beside_training_is_there(tmp_path):
    trainer, _ = fitted(tmp_path, kind=AsyncCheckpoint)
    assert evaluated(trainer, "test") == 2


@pytest.mark.parametrize("precision", [OptLevel("O2", loss_scale=8.0), "O3", "O5", "bf16-true"])
def test_half_weights_and_their_masters_are_those_of_the_file(precision, tmp_path):
    trainer, module = fitted(tmp_path, precision=precision)
    assert evaluated(trainer, "test") == 2
    assert (module.weight.dtype, module.weight.tolist()) == (torch.float32, [2, 2])
    trainer.fit_loop.max_epochs = 4
    SCORES.append(4.0)
    try:
        trainer.fit(module, batches())
    finally:
        SCORES.pop()
    assert module.weight.tolist() == [3, 3], "a second fit begins with the weights that the test has left"
