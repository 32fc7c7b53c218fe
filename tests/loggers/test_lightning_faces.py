"""Loggers as code written for Lightning uses them."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch

from fabricamp._utils import say_once as say_once_module
from fabricamp.callbacks import EarlyStopping
from fabricamp.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from fabricamp.loggers.logger import DummyLogger, rank_zero_experiment
from fabricamp.profilers import SimpleProfiler
from tests.small import Classifier, loader, quiet_trainer


class Draws(Classifier):
    """Logs an image through the logger's ``experiment``, and calls attributes that it lacks."""

    def on_train_start(self):
        self.logger.experiment.add_image("x", torch.zeros(3, 2, 2), 0)
        self.logger.experiment.config.update({"a": 1})
        self.logger.experiment["key"].append(2)
        self.logger.watch(self)
        assert self.logger.log_dir is None


def test_a_trial_run_swallows_calls_for_the_logger(tmp_path):
    trainer = quiet_trainer(fast_dev_run=True, logger=TensorBoardLogger(tmp_path))
    trainer.fit(Draws(), loader())
    assert isinstance(trainer.logger, DummyLogger)
    assert list(tmp_path.iterdir()) == []
    assert quiet_trainer(fast_dev_run=True, logger=False).logger is None


def test_other_ranks_swallow_them_too(monkeypatch):
    class Mine(Logger):
        @property
        @rank_zero_experiment
        def experiment(self):
            return "the real one"

    assert Mine().experiment == "the real one"
    monkeypatch.setenv("RANK", "1")
    assert Mine().experiment.log({"a": 1}) is not None
    assert Mine().experiment != "the real one"


@pytest.mark.parametrize("fails", [False, True])
def test_a_logger_learns_how_the_run_ended(fails):
    class Notes(Logger):
        def __init__(self):
            self.ended = []

        def finalize(self, status):
            self.ended.append(status)

    class Fails(Classifier):
        def on_train_start(self):
            if fails:
                raise ValueError("mine")

    notes = Notes()
    trainer = quiet_trainer(max_steps=1, logger=notes)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            trainer.fit(Fails(), loader())
    else:
        trainer.fit(Fails(), loader())
    assert notes.ended == ["failed" if fails else "success"]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_folders_are_text(kind, tmp_path):
    logger = kind(tmp_path, name="run")
    assert logger.save_dir == str(tmp_path)
    assert logger.root_dir == str(tmp_path / "run")
    assert logger.log_dir == str(tmp_path / "run" / "version_0")


class Moves(Classifier):
    """Changes the working folder once training has begun."""

    def on_train_start(self):
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")


FILE_LOGGERS = pytest.mark.parametrize(
    ("kind", "file"),
    [(CSVLogger, "metrics.csv"), (TensorBoardLogger, "events.out.*"), (JSONLinesLogger, "metrics.jsonl")],
)


@FILE_LOGGERS
def test_paths_are_shown_as_given_and_stay_where_they_were(kind, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = kind(os.path.join("here", ""), name="run")  # noqa: PTH118 - a Path has no slash behind it
    options = {"enable_checkpointing": True, "profiler": SimpleProfiler(filename="report"), "default_root_dir": "here"}
    trainer = quiet_trainer(max_steps=2, log_every_n_steps=1, logger=logger, **options)
    trainer.fit(Moves(), loader(), loader())

    assert (logger.save_dir, logger.root_dir, trainer.default_root_dir) == ("here/", "here/run", "here")
    assert trainer.log_dir == logger.log_dir == "here/run/version_0"
    folder = tmp_path / "here" / "run" / "version_0"
    assert (trainer.log_folder, trainer.root_folder) == (str(folder), str(tmp_path / "here"))
    assert len(list(folder.glob(file))) == 1
    assert {"run.json", "fit-report.txt", "checkpoints"} <= {one.name for one in folder.iterdir()}
    assert Path(trainer.checkpoint_callback.best_model_path).parent == folder / "checkpoints"
    trainer.validate(dataloaders=loader(), ckpt_path="best", verbose=False)
    trainer.validate(dataloaders=loader(), ckpt_path="last", verbose=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_a_logger_the_root_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    trainer = quiet_trainer(max_steps=2, enable_checkpointing=True, default_root_dir="here")
    os.chdir("other")
    trainer.fit(Moves(), loader())
    assert trainer.log_dir == trainer.default_root_dir == "here"
    assert [one.suffix for one in (tmp_path / "here" / "checkpoints").iterdir()] == [".ckpt"]
    second = quiet_trainer(max_steps=3, enable_checkpointing=True, default_root_dir=str(tmp_path / "here"))
    second.fit(Classifier(), loader(), ckpt_path="last")
    assert second.global_step == 3


@FILE_LOGGERS
def test_a_version_that_is_a_path_and_a_home_folder(kind, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = kind("~/runs", name=None, version="a/b")
    assert (logger.save_dir, logger.root_dir) == ("~/runs", "~/runs")
    assert logger.log_dir == str(logger.folder) == str(tmp_path / "runs" / "a" / "b")


def test_the_best_score_is_a_tensor():
    stopping = EarlyStopping("val_loss")
    quiet_trainer(max_epochs=1, callbacks=[stopping]).fit(Classifier(), loader(), loader())
    assert 0 < stopping.best_score.item() < 10
    assert stopping.state_dict()["best_score"] == stopping.best_score.item()


def test_a_step_outside_a_fit_logs_nothing_and_says_so_once(caplog):
    say_once_module.say_once.cache_clear()
    model, (batch, *_) = Classifier(), list(loader())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert model.training_step(batch, 0).requires_grad
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(model, loader())
    model.log("late", 1.0)  # the fit is over
    assert "late" not in trainer.callback_metrics
    told = [one.message for one in caplog.records if "logs nothing" in one.message]
    assert len(told) == 1


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger, TensorBoardLogger])
def test_a_subclass_computes_its_name(tmp_path, kind):
    class Named(kind):
        def __init__(self, save_dir):
            super().__init__(save_dir)
            self.own = "mine"

        @property
        def name(self):
            return self.own

    logger = Named(tmp_path)
    quiet_trainer(max_steps=1, logger=logger, log_every_n_steps=1).fit(Classifier(), loader())
    assert logger.log_dir == str(logger.folder) == str(tmp_path / "mine" / "version_0")
    assert list(logger.folder.iterdir())
    copied = pickle.loads(pickle.dumps(kind(tmp_path, name="a/b", version=3)))
    assert (copied.name, copied.folder) == ("a/b", tmp_path / "a" / "b" / "version_3")


def test_the_trainer_knows_its_log_dir_before_fit(tmp_path, monkeypatch):
    trainer = quiet_trainer(max_steps=1, logger=CSVLogger(tmp_path))
    before = trainer.log_dir
    assert before == str(tmp_path / "fabricamp_logs" / "version_0")
    trainer.fit(Classifier(), loader())
    assert trainer.log_dir == trainer.logger.log_dir == before
    assert quiet_trainer(default_root_dir=tmp_path).log_dir == str(tmp_path)
    other = quiet_trainer(logger=CSVLogger(tmp_path))
    monkeypatch.setenv("RANK", "1")  # another rank, before rank 0 has sent the version
    assert other.log_dir is None
