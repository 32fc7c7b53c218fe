"""Who makes the saves of a ModelCheckpoint: plans, or the methods of Lightning that a class, an object or a plug-in asks for.

Without a monitor, plans keep the newest two files, and Lightning's methods one.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.checkpoint_io import CheckpointIO
from tests.small import Classifier, loader, quiet_trainer

ONE = ["epoch=2-step=12.ckpt"]
TWO = ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]


def fit(folder, *callbacks, epochs=3, **options):
    trainer = quiet_trainer(callbacks=[*callbacks], max_epochs=epochs, enable_checkpointing=True, **options)
    trainer.fit(Classifier(), loader(16))
    return sorted(path.name for path in Path(folder).iterdir())


class Named(ModelCheckpoint):
    """Overrides a method that is no step of a save."""

    def _format_checkpoint_name(self, *args, **options):
        return "mine-" + super()._format_checkpoint_name(*args, **options)


class Saves(ModelCheckpoint):
    """Overrides a step of a save and calls the base class."""

    saved = 0

    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        self.saved += 1


class Alone(ModelCheckpoint):
    """Overrides a step of a save without the base class."""

    def _save_checkpoint(self, trainer, filepath):
        trainer.save_checkpoint(filepath)


class Files(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path):
        Path(path).unlink()


# -- who makes the saves


def test_plans_of_a_class_without_an_override(tmp_path):
    assert fit(tmp_path, ModelCheckpoint(tmp_path)) == TWO


def test_plans_of_a_class_that_overrides_no_step_of_a_save(tmp_path):
    assert fit(tmp_path, Named(tmp_path)) == [f"mine-{name}" for name in TWO]


STEPS_OF_A_SAVE = {
    "_get_metric_interpolated_filepath_name", "_link_checkpoint", "_monitor_candidates", "_remove_checkpoint",
    "_save_checkpoint", "_save_last_checkpoint", "_save_monitor_checkpoint", "_save_none_monitor_checkpoint",
    "_save_topk_checkpoint", "_should_remove_checkpoint", "_should_skip_saving_checkpoint", "_update_best_and_save",
    "check_monitor_top_k", "file_exists",
}  # fmt: skip


def test_an_override_of_a_step_of_a_save_and_no_other_makes_saves_by_methods():
    found = set()
    for name in dir(ModelCheckpoint):
        member = inspect.getattr_static(ModelCheckpoint, name)
        if isinstance(member, FunctionType | staticmethod) and not name.startswith("__"):
            checkpoint = ModelCheckpoint()
            setattr(checkpoint, name, getattr(checkpoint, name))
            if checkpoint._calls_methods:
                found.add(name)
    assert found == STEPS_OF_A_SAVE


def test_a_class(tmp_path):
    assert fit(tmp_path, Alone(tmp_path)) == ONE
    assert read_checkpoint(tmp_path / ONE[0])["written_by"], "the file is the callback's, whoever writes it"


def test_a_class_whose_override_calls_the_base(tmp_path):
    checkpoint = Saves(tmp_path)
    assert (fit(tmp_path, checkpoint), checkpoint.saved) == (ONE, 3)


@pytest.mark.parametrize("begins", ["before the fit", "within the fit"])
def test_an_object(tmp_path, begins):
    checkpoint = ModelCheckpoint(tmp_path)
    base, saved = checkpoint._save_checkpoint, []

    def save(trainer, filepath):
        base(trainer, filepath)
        saved.append(Path(filepath).name)

    class Begins(Callback):
        def on_train_start(self, trainer, pl_module):
            checkpoint._save_checkpoint = save

    if begins == "before the fit":
        checkpoint._save_checkpoint = save
    assert fit(tmp_path, Begins(), checkpoint) == ONE
    assert len(saved) == 3


def test_a_class_whose_setup_does_not_call_the_base(tmp_path):
    class Elsewhere(Saves):
        def setup(self, trainer, pl_module, stage):
            self.dirpath = str(tmp_path)

    checkpoint = Elsewhere()
    assert (fit(tmp_path, checkpoint), checkpoint.saved) == (ONE, 3)


def test_a_plug_in_until_another_fit_has_none(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path)
    assert fit(tmp_path, checkpoint, plugins=[Files()]) == ONE
    assert fit(tmp_path, checkpoint, epochs=4) == [*ONE, "epoch=3-step=16.ckpt"]


@pytest.mark.parametrize("kind", [ModelCheckpoint, Saves])
def test_a_copy_saves_as_the_callback_does(tmp_path, kind):
    expected = ONE if kind is Saves else TWO
    checkpoint = kind(tmp_path / "first")
    fit(tmp_path / "first", checkpoint, epochs=1)
    for number, copied in enumerate([copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))]):
        assert copied.best_k_models == checkpoint.best_k_models
        assert copied.state_dict() == checkpoint.state_dict()
        copied.dirpath = str(tmp_path / str(number))
        assert fit(copied.dirpath, copied) == expected


def test_a_monitor_that_a_validation_still_lacks_is_waited_for_once(tmp_path):
    class Late(Classifier):
        def validation_step(self, batch, batch_idx):
            if self.trainer.global_step > 2:
                self.log("v", torch.tensor(1.0))

    checkpoint = Saves(tmp_path, monitor="v", save_last=True, every="1 steps", save_top_k=-1)
    trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=1, enable_checkpointing=True, val_check_interval=2)
    trainer.fit(Late(), loader(16), loader(8))
    # Step 1 waits for the validation after step 2, which logs nothing: the last file alone.  Step 3 waits for that after step 4.
    assert checkpoint.saved == 3
    assert [Path(path).name for path in checkpoint.best_k_models] == ["epoch=0-step=4.ckpt"]


def test_verbose_says_only_of_what_was_ranked_that_it_is_not_among_the_top_k(tmp_path, caplog):
    class Late(Classifier):
        def validation_step(self, batch, batch_idx):
            if self.trainer.global_step > 2:
                self.log("v", torch.tensor(float(self.trainer.global_step)))

    checkpoint = Saves(tmp_path, monitor="v", verbose=True)
    trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=2, enable_checkpointing=True, val_check_interval=2)
    with caplog.at_level("INFO", logger="fabricamp"):
        trainer.fit(Late(), loader(16), loader(8))
    lines = [one.getMessage() for one in caplog.records if "among" in one.getMessage()]
    assert lines == [f"Saves: step {step} is not among the top 1" for step in (6, 8)]


def test_a_native_program_never_imports_what_is_behind_the_door(tmp_path):
    program = f"""
import sys
from fabricamp.callbacks import ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer
checkpoint = ModelCheckpoint({str(tmp_path)!r}, monitor="step", mode="max", save_last=True)
trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=2, enable_checkpointing=True)
trainer.fit(Classifier(), loader(16))
trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=3, enable_checkpointing=True)
trainer.fit(Classifier(), loader(16), ckpt_path="last")
assert checkpoint.best_model_path and checkpoint.best_k_models
print("fabricamp.lightning.rotation" in sys.modules)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


# -- what is asked before setup


def before_setup(checkpoint):
    values = {"epoch": 1, "step": 4, "v": torch.tensor(0.5)}
    return {
        "name": checkpoint.format_checkpoint_name(values),
        "last": checkpoint.format_checkpoint_name(values, checkpoint.CHECKPOINT_NAME_LAST, ver=2),
        "state": checkpoint.state_dict(),
        "dirpath": checkpoint.dirpath,
        "files": checkpoint.known_files(),
        "best": (checkpoint.best_k_models, checkpoint.best_model_path, checkpoint.best_model_score),
        "worst": (checkpoint.kth_best_model_path, checkpoint.kth_value, checkpoint.current_score),
        "step": (
            checkpoint._last_global_step_saved,
            checkpoint._defer_save_until_validation,
            checkpoint._every_n_epochs,
        ),
    }


@pytest.mark.parametrize("dirpath", [None, "given"])
@pytest.mark.parametrize("kind", [Saves, Alone, "object"])
def test_an_override_answers_before_setup_as_a_plain_one(tmp_path, kind, dirpath):
    folder = tmp_path / dirpath if dirpath else None
    plain = ModelCheckpoint(folder, "{epoch}-{v:.1f}", monitor="v")
    other = (ModelCheckpoint if kind == "object" else kind)(folder, "{epoch}-{v:.1f}", monitor="v")
    if kind == "object":
        other._save_checkpoint = lambda trainer, filepath: None
    answers = before_setup(other)
    assert answers == before_setup(plain)
    assert Path(answers["name"]) == Path(folder or "") / "epoch=1-v=0.5.ckpt"
    assert before_setup(copy.deepcopy(other)) == answers


def test_a_state_that_is_loaded_before_setup(tmp_path):
    checkpoint = Saves(tmp_path, monitor="step", mode="max", save_top_k=2)
    fit(tmp_path, checkpoint)
    state = checkpoint.state_dict()
    assert {"best_model_score", "kth_best_model_path", "kth_value"} <= state.keys()
    plain = ModelCheckpoint(tmp_path, monitor="step", mode="max", save_top_k=2)
    again = Saves(tmp_path, monitor="step", mode="max", save_top_k=2)
    for loaded in (plain, again):
        loaded.load_state_dict(state)
        assert (loaded.kth_value, loaded.best_model_score) == (8, 12)
    assert again.state_dict() == state
    assert state.keys() - plain.state_dict().keys() == {"best_model_score", "kth_best_model_path", "kth_value"}
