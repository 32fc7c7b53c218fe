"""Errors have fabricamp's classes, and also the built-in class that Lightning raises in the same situation."""

from __future__ import annotations

import errno
import pickle
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fabricamp
from fabricamp.callbacks import EarlyStopping, GradientAccumulationScheduler
from fabricamp.checkpoint import read_checkpoint, storage
from fabricamp.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    MissingMetricError,
    reworded,
)
from fabricamp.launch.failures import Cause, as_error
from fabricamp.loggers import CSVLogger, Logger, WandbLogger
from fabricamp.tuner import Tuner
from fabricamp.watchdog import Watchdog
from tests.distributed.ranks import run_ranks
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


# -- further classes


class Two(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[2])]


class Stateful(fabricamp.Callback):
    def state_dict(self):
        return {"a": 1}


def no_wandb():
    with mock.patch.dict(sys.modules, {"wandb": None}):
        WandbLogger()


def resume_from_weights(folder):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader(8))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    quiet_trainer(max_epochs=2).fit(Classifier(), loader(8), ckpt_path=folder / "weights.ckpt")


CALLS = {
    "no loader": (TypeError, "gives no batches", lambda _: quiet_trainer().fit(Classifier(), 3)),
    "clipping": (TypeError, "gradient_clip_val='a' is not allowed", lambda _: quiet_trainer(gradient_clip_val="a")),
    "accumulation": (TypeError, "give a dict from an epoch", lambda _: GradientAccumulationScheduler({})),
    "two optimizers": (
        RuntimeError,
        "automatic optimization takes one",
        lambda _: quiet_trainer().fit(Two(), loader(8)),
    ),
    "two callbacks": (RuntimeError, "two callbacks have", lambda _: quiet_trainer(callbacks=[Stateful(), Stateful()])),
    "no rate": (
        AttributeError,
        "have no 'rate' that lr_find could set",
        lambda _: Tuner(quiet_trainer()).lr_find(Classifier(), loader(8), attr_name="rate"),
    ),
    "no module": (AttributeError, "the Trainer has no module yet", lambda _: quiet_trainer().save_checkpoint("a.ckpt")),
    "no package": (ModuleNotFoundError, "WandbLogger needs the package wandb", lambda _: no_wandb()),
    "weights": (KeyError, "holds weights only, and training cannot resume", resume_from_weights),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_is_of_lightnings_class_too(name, tmp_path):
    kind, words, call = CALLS[name]
    with pytest.raises(kind, match=words) as caught:
        call(tmp_path)
    assert isinstance(caught.value, CheckpointError if kind is KeyError else ConfigError)
    assert words in str(caught.value)
    assert "\\n" not in str(caught.value)  # KeyError shows a repr


def no_loss_on_rank_1():
    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return None if self.global_rank else super().training_step(batch, batch_idx)

    quiet_trainer(max_epochs=1, devices=2, strategy="delayed_ddp").fit(Skips(), loader(8))


def test_a_step_without_a_loss_on_one_rank_is_a_runtime_error():
    with pytest.raises(AssertionError, match="OptimizationError: training_step returned None on rank 1"):
        run_ranks(no_loss_on_rank_1, 2)


# -- errors that the package itself catches


def test_an_error_of_ours_in_a_constructor_is_not_called_a_missing_argument(tmp_path):
    class Wants(Classifier):
        def __init__(self):
            super().__init__()
            if Wants.refuses:
                raise ArgumentTypeError("size='a': give a number")

    Wants.refuses = False
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Wants(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    Wants.refuses = True
    with pytest.raises(ArgumentTypeError, match=r"^size='a': give a number$"):
        Wants.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_loggers_missing_checkpoint_is_no_trouble_of_its_disk(tmp_path):
    class Reads(Logger):
        def log_metrics(self, metrics, step):
            read_checkpoint(tmp_path / "none.ckpt")

    trainer = quiet_trainer(max_epochs=1, logger=Reads(), log_every_n_steps=1)
    with pytest.raises(CheckpointNotFoundError):
        trainer.fit(Classifier(), loader(8))


def test_a_config_error_asks_no_other_rank_for_its_cause(monkeypatch):
    def never(*_):
        raise AssertionError("polls")

    watch = object.__new__(Watchdog)
    watch._store = SimpleNamespace(check=never)
    watch._heartbeats = never
    assert watch._failed_before(MissingMetricError("no metric")) == {}


def test_a_file_that_is_removed_while_it_is_opened_is_a_missing_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"PK")

    def gone(_):
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(storage, "open_for_reading", gone)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint") as caught:
        read_checkpoint(path)
    assert caught.value.filename == str(path)
