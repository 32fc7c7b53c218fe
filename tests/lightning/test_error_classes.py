"""Errors are of fabricamp's classes, and also of the built-in class that Lightning raises in the same place."""

from __future__ import annotations

import errno
import pickle

import pytest
import torch

import fabricamp
from fabricamp.callbacks import EarlyStopping
from fabricamp.errors import CheckpointError, CheckpointNotFoundError, ConfigError, reworded
from fabricamp.launch.failures import Cause, as_error
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, loader, quiet_trainer


def test_a_checkpoint_that_is_not_there_is_a_missing_file(tmp_path):
    path = str(tmp_path / "none.ckpt")
    calls = [
        lambda: quiet_trainer().fit(Classifier(), loader(), ckpt_path=path),
        lambda: quiet_trainer().test(Classifier(), loader(), ckpt_path=path),
        lambda: Classifier.load_from_checkpoint(path),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="there is no checkpoint") as caught:
            call()
        assert isinstance(caught.value, CheckpointError)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, path)


def test_a_link_to_nothing_is_a_missing_file(tmp_path):
    link = tmp_path / "link.ckpt"
    link.symlink_to(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError, match="is a link to"):
        Classifier.load_from_checkpoint(link)


def test_a_file_that_is_there_is_no_missing_file(tmp_path):
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(b"PK")
    for path in (damaged, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            Classifier.load_from_checkpoint(path)
        assert not isinstance(caught.value, OSError)


def test_the_name_of_a_missing_file_reaches_other_processes():
    error = CheckpointNotFoundError("there is no checkpoint a.ckpt", "a.ckpt")
    for copy in (pickle.loads(pickle.dumps(error)), reworded(error, str(error))):
        assert (str(copy), copy.filename, copy.errno) == (str(error), "a.ckpt", errno.ENOENT)


@pytest.mark.parametrize(
    "name", ["CheckpointNotFoundError", "NotAttachedError", "MissingCheckpointError", "ConfigError"]
)
def test_the_starter_raises_the_class_that_a_worker_raised(name):
    raised = as_error(Cause(1, 1, f"{name}: words", f"{name}: words\n\ntrace", [], ""))
    assert type(raised).__name__ == name
    assert str(raised).startswith("words\n")


def test_a_module_without_a_trainer_is_a_runtime_error():
    for use in (lambda: Classifier().trainer, lambda: Classifier().print("x")):
        with pytest.raises(RuntimeError, match="is not attached to a Trainer") as caught:
            use()
        assert isinstance(caught.value, ConfigError)


def test_weights_that_ask_for_the_trainer_are_not_called_another_models(tmp_path):
    class Asks(Classifier):
        def load_state_dict(self, *args, **kwargs):
            self.print("loading")
            return super().load_state_dict(*args, **kwargs)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match="Asks is not attached to a Trainer"):
        Asks.load_from_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("entry_point", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("module", [None, torch.nn.Linear(2, 2), Classifier])
def test_what_is_no_module_is_a_type_error(entry_point, module):
    with pytest.raises(TypeError, match=f"{entry_point} got") as caught:
        getattr(quiet_trainer(), entry_point)(module, loader())
    assert isinstance(caught.value, ConfigError)


def test_early_stopping_without_its_metric_is_a_runtime_error():
    trainer = quiet_trainer(max_epochs=1, callbacks=[EarlyStopping("other")])
    with pytest.raises(RuntimeError, match="found no metric 'other'") as caught:
        trainer.fit(Classifier(), loader(), loader())
    assert isinstance(caught.value, ConfigError)


def test_best_without_a_best_is_a_value_error():
    for entry_point in ("validate", "test", "predict"):
        with pytest.raises(ValueError, match="ckpt_path='best'"):
            getattr(quiet_trainer(), entry_point)(Classifier(), loader(), ckpt_path="best")


class Kept(Classifier):
    def __init__(self, rate=1):
        super().__init__()
        self.save_hyperparameters()


class KeptData(fabricamp.DataModule):
    def __init__(self, rate=2):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader()


def test_one_hyperparameter_with_two_values_is_a_runtime_error(tmp_path):
    trainer = quiet_trainer(max_epochs=1, logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match="save different values under the same names: rate") as caught:
        trainer.fit(Kept(), datamodule=KeptData())
    assert isinstance(caught.value, ConfigError)
