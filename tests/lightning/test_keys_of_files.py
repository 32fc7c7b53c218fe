"""Keys and names in checkpoints, and errors for files that do not fit, as in Lightning 2.6."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError, DataModule, habits
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.small import Classifier, loader, quiet_trainer


@pytest.fixture
def under_the_alias(monkeypatch):
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)


class Sized(Classifier):
    def __init__(self, size=3):
        super().__init__()
        self.save_hyperparameters()


class Counted(DataModule):
    def __init__(self, seen=0):
        super().__init__()
        self.save_hyperparameters()
        self.seen = seen

    def train_dataloader(self):
        self.seen += 1
        return loader(8)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"] + 100


# -- names of keys and files


def test_the_keys_of_hyper_parameters_have_names(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Sized(4), datamodule=Counted(0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert state[Sized.CHECKPOINT_HYPER_PARAMS_KEY] == {"size": 4}
    assert state[Counted.CHECKPOINT_HYPER_PARAMS_KEY] == {"seen": 0}
    # Lightning's values: "kwargs" means that each hyper-parameter is a separate argument of the constructor.
    assert (Sized.CHECKPOINT_HYPER_PARAMS_NAME, Sized.CHECKPOINT_HYPER_PARAMS_TYPE) == ("hparams_name", "hparams_type")
    names = (Counted.CHECKPOINT_HYPER_PARAMS_NAME, Counted.CHECKPOINT_HYPER_PARAMS_TYPE)
    assert names == ("datamodule_hparams_name", "datamodule_hparams_type")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_file_of_hyper_parameters_has_a_name(kind, tmp_path):
    logger = type("Named", (kind,), {"NAME_HPARAMS_FILE": "arguments.yaml"})(tmp_path)
    logger.log_hyperparams({"a": 1})
    logger.save()
    assert kind.NAME_HPARAMS_FILE == "hparams.yaml"
    assert (logger.folder / "arguments.yaml").read_text() == "a: 1\n"


# -- the state of a data module


def test_the_state_of_a_data_module_has_its_classes_name(tmp_path):
    class Inner(Counted):
        pass

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), datamodule=Inner())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert state[Inner.__qualname__] == {"seen": 1}
    assert "." in Inner.__qualname__
    assert Inner.load_from_checkpoint(tmp_path / "a.ckpt").seen == 101


@pytest.mark.parametrize("key", ["Counted", "data"])
def test_the_state_of_a_data_module_is_found_by_either_key(key, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), datamodule=Counted())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = read_checkpoint(tmp_path / "a.ckpt")
    if key == "Counted":  # as in Lightning's files
        del state["data"]["datamodule"]
    else:  # as in files of earlier versions
        del state["Counted"]
    state.pop("checksum", None)
    torch.save(state, tmp_path / "b.ckpt")
    resumed = Counted()
    quiet_trainer(max_epochs=1).fit(Classifier(), datamodule=resumed, ckpt_path=tmp_path / "b.ckpt")
    assert resumed.seen == 102


def test_a_data_module_without_a_state_adds_no_key(tmp_path):
    class Plain(DataModule):
        def train_dataloader(self):
            return loader(8)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), datamodule=Plain())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Plain.__qualname__ not in torch.load(tmp_path / "a.ckpt", weights_only=True)


# -- the key of a ModelCheckpoint


def test_under_the_alias_a_checkpoint_callback_has_lightnings_key(under_the_alias):
    assert ModelCheckpoint(monitor="x").state_key == (
        "ModelCheckpoint{'monitor': 'x', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
        "'train_time_interval': None}"
    )


@pytest.mark.parametrize("written_under_the_alias", [False, True])
def test_the_state_of_a_checkpoint_callback_is_found_by_either_key(written_under_the_alias, tmp_path, monkeypatch):
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING if written_under_the_alias else habits.NATIVE)
    before = ModelCheckpoint(tmp_path, monitor="loss")
    quiet_trainer(max_epochs=2, callbacks=[before], enable_checkpointing=True).fit(Classifier(), loader(8))
    monkeypatch.setattr(habits, "_present", habits.NATIVE if written_under_the_alias else habits.LIGHTNING)
    after = ModelCheckpoint(tmp_path, monitor="loss")
    trainer = quiet_trainer(max_epochs=2, callbacks=[after], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(8), ckpt_path=before.best_model_path)
    assert after.best_model_path == before.best_model_path
    assert after.best_model_score == before.best_model_score


# -- files that do not fit


def test_a_missing_file_of_hyper_parameters_gives_none(tmp_path, caplog):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Sized(4), datamodule=Counted(7))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    none = tmp_path / "none.yaml"
    assert Sized.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=none).hparams.size == 3
    assert Counted.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=none).hparams.seen == 0
    assert f"hparams_file={str(none)!r} does not exist" in caplog.text


def test_a_checkpoint_beyond_max_epochs_is_an_error(tmp_path):
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Classifier(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="has 2 finished epochs, more than max_epochs=1; give Trainer a higher"):
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    for max_epochs in (2, -1):
        quiet_trainer(max_epochs=max_epochs, max_steps=1).fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    quiet_trainer().test(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
