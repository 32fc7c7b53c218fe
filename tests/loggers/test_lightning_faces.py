"""Loggers as code written for Lightning uses them."""

from __future__ import annotations

import logging

import pytest
import torch

from fabricamp import say_once as say_once_module
from fabricamp.callbacks import EarlyStopping
from fabricamp.loggers import CSVLogger, Logger, TensorBoardLogger
from fabricamp.loggers.logger import DummyLogger, rank_zero_experiment
from tests.small import Classifier, loader, quiet_trainer


class Draws(Classifier):
    """Gives the logger's own object a picture, and asks it for more than it can know."""

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
