"""ModelCheckpoint by steps with a metric of the validation: a save at a validated step waits for the validation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer


class Judged(Classifier):
    """Logs the number of the validation as ``score``."""

    def on_validation_epoch_end(self):
        self.log("score", float(self.trainer.global_step))


class Trained(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("score", float(self.global_step))
        return super().training_step(batch, batch_idx)


def saved(folder, *, module=None, every=1, callback=None, ckpt_path=None, after=False, save_last=None, **options):
    """Returns {step: score} of the files after two epochs of four steps."""
    checkpoint = ModelCheckpoint(
        folder,
        "{step}-{score:.0f}",
        monitor="score",
        mode="max",
        save_top_k=-1,
        save_last=save_last,
        every_n_train_steps=every,
        save_on_train_epoch_end=False if after else None,
    )
    callbacks = [checkpoint, *([callback] if callback else [])]
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True, "callbacks": callbacks}
    trainer = quiet_trainer(**{**settings, **options})
    trainer.fit(module or Judged(), loader(16), loader(4), ckpt_path=ckpt_path)
    names = [Path(path).stem for path in checkpoint.known_files()]
    parts = [name.split("-") for name in names if name.startswith("step")]
    return {int(step.partition("=")[2]): int(score.partition("=")[2]) for step, score in sorted(parts)}


def test_a_validated_step_has_the_score_of_its_validation(tmp_path):
    assert saved(tmp_path, after=True) == {4: 4, 5: 4, 6: 4, 7: 4, 8: 8}


@pytest.mark.parametrize("interval", [2, 0.5, "2 steps"])
def test_within_an_epoch(interval, tmp_path):
    assert saved(tmp_path, val_check_interval=interval) == {2: 2, 3: 2, 4: 4, 5: 4, 6: 6, 7: 6, 8: 8}


def test_before_its_first_value_the_next_validation_saves(tmp_path):
    assert saved(tmp_path, every=3, after=True) == {4: 4, 6: 4}


def test_last_is_written_at_its_step_and_the_validation_ranks(tmp_path):
    assert saved(tmp_path, every=3, after=True, save_last=True, max_steps=4) == {4: 4}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_last_batch_that_is_not_validated_is_saved_at_once(tmp_path):
    scores = saved(tmp_path, val_check_interval=3)
    assert scores == {3: 3, 4: 3, 5: 3, 6: 3, 7: 7, 8: 7}


def test_a_metric_of_training_and_a_run_without_validation(tmp_path):
    steps = {step: step - 1 for step in range(1, 9)}
    assert saved(tmp_path / "a", module=Trained(), after=True) == steps
    assert saved(tmp_path / "b", module=Trained(), after=True, limit_val_batches=0) == steps


def test_where_files_are_saved_at_the_end_of_the_train_epoch_nothing_waits(tmp_path):
    assert saved(tmp_path) == {5: 4, 6: 4, 7: 4, 8: 4}


class Ends(Callback):
    """Saves in the validation of step 4, and ends the run there."""

    def __init__(self, path):
        self.path = path

    def on_validation_start(self, trainer, pl_module):
        if trainer.state.fitting and trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
            raise KeyError("the end")


def test_a_run_that_ended_in_the_validation_saves_after_it(tmp_path):
    with pytest.raises(KeyError, match="the end"):
        saved(tmp_path / "files", callback=Ends(tmp_path / "cut.ckpt"), after=True)
    assert saved(tmp_path / "files", ckpt_path=tmp_path / "cut.ckpt", after=True) == {4: 4, 5: 4, 6: 4, 7: 4, 8: 8}
