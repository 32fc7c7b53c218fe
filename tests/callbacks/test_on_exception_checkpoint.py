"""OnExceptionCheckpoint: the file of a failed fit.  Checkpoint: the base class by which the Trainer finds checkpoint callbacks."""

from __future__ import annotations

import contextlib
import importlib
import signal
from pathlib import Path

import pytest
import torch

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from fabricamp.errors import MissingCheckpointError
from tests.small import Classifier, loader, quiet_trainer


def names(folder):
    return [one.name for one in Path(folder).iterdir()]


def fail():
    raise ValueError("a step")


class Fails(Classifier):
    def __init__(self, how=fail):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.global_step == 5:
            self.how()
        return super().training_step(batch, batch_idx)


def fit(folder, module, ckpt_path=None, **options):
    callback = OnExceptionCheckpoint(folder, **options)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=callback)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return [one.tolist() for one in module.parameters()]


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", [fail, press_ctrl_c])
def test_a_fit_that_failed_goes_on_from_its_file_which_is_gone_when_it_has_ended_well(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ValueError, KeyboardInterrupt, SystemExit):  # a prompt's fit returns after Ctrl-C
        fit("rescue", Fails(how), filename="rescued")
    file = tmp_path / "rescue" / "rescued.ckpt"
    assert names("rescue") == [file.name]
    callback = OnExceptionCheckpoint("rescue", "rescued")
    assert (callback.dirpath, callback.ckpt_path) == ("rescue", "rescue/rescued.ckpt")  # the path as it was given
    again = quiet_trainer(enable_checkpointing=True, callbacks=OnExceptionCheckpoint("rescue", "rescued"))
    again.validate(Classifier(), loader(), ckpt_path=file, verbose=False)
    assert file.exists()  # only a successful fit removes the file
    assert fit("rescue", Fails(lambda: None), file, filename="rescued") == fit(tmp_path, Classifier())
    assert names("rescue") == []


def test_what_fails_after_an_update_repeats_the_whole_accumulation(tmp_path):
    """Its gradients are gone, and an accumulation that began with its last micro-batch would end at another one."""

    class Fails(Classifier):
        def lr_scheduler_step(self, scheduler, metric):
            if self.trainer.global_step == 2:
                raise RuntimeError("a schedule")

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    trainer = quiet_trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        enable_checkpointing=True,
        callbacks=[OnExceptionCheckpoint(tmp_path)],
    )
    with pytest.raises(RuntimeError, match="a schedule"):
        trainer.fit(Fails(), loader(64))
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file)["loops"]["fit"]
    assert (saved["batch_idx"], saved["open_batches"]) == (4, 0)


def test_a_trial_and_what_failed_before_training_leave_no_file(tmp_path):
    class Early(Classifier):
        def setup(self, stage):
            raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        fit(tmp_path / "one", Early())
    trainer = quiet_trainer(
        fast_dev_run=8, enable_checkpointing=True, callbacks=OnExceptionCheckpoint(tmp_path / "one")
    )
    with pytest.raises(ValueError, match="a step"):
        trainer.fit(Fails(), loader())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="filename=''.*give a name"):
        OnExceptionCheckpoint(tmp_path, "")
    with pytest.raises(ConfigError, match="dirpath=None.*give a path"):
        OnExceptionCheckpoint(None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; choose another folder"):
        fit(tmp_path / "file", Classifier())
    options = {"devices": 2, "start_method": "fork", "enable_checkpointing": True}
    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), **options)
    with pytest.raises(ConfigError, match="OnExceptionCheckpoint with 2 processes"):
        trainer.fit(Classifier(), loader())


class Own(Checkpoint):
    """A user's checkpoint callback that does not derive from ModelCheckpoint."""

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_callback_of_ones_own_takes_the_place_of_the_default_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, other = Own(), Callback()
    own.path = tmp_path / "own.ckpt"
    trainer = quiet_trainer(max_steps=2, enable_checkpointing=True, callbacks=[own, other], default_root_dir=tmp_path)
    trainer.fit(Classifier(), loader())
    assert trainer.checkpoint_callbacks == [own]
    assert trainer.checkpoint_callback is own
    assert trainer.callbacks[-1] is own  # after the callbacks that it saves the state of
    assert names(tmp_path) == ["own.ckpt"]
    for word in ("last", "best"):
        with pytest.raises(MissingCheckpointError, match="has no ModelCheckpoint"):
            trainer.fit(Classifier(), loader(), ckpt_path=word)

    both = quiet_trainer(max_steps=2, enable_checkpointing=True, callbacks=[own, ModelCheckpoint(tmp_path / "kept")])
    both.fit(Classifier(), loader())
    assert [type(one) for one in both.checkpoint_callbacks] == [Own, ModelCheckpoint]
    assert both.checkpoint_callback.best_model_path.startswith(str(tmp_path / "kept"))
    with pytest.raises(ConfigError, match="holds a Own, but enable_checkpointing=False"):
        quiet_trainer(callbacks=own)


def test_lightnings_paths():
    assert issubclass(ModelCheckpoint, Checkpoint)
    assert importlib.import_module("fabricamp.callbacks.checkpoint").Checkpoint is Checkpoint
    module = importlib.import_module("fabricamp.callbacks.on_exception_checkpoint")
    assert module.OnExceptionCheckpoint is OnExceptionCheckpoint
