"""Subclasses that override or call private methods of Lightning: called as in Lightning 2.6, or refused by name.

The expected calls, files and values are those that Lightning 2.6.6 prints for the same classes.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import runpy
from pathlib import Path

import pytest
import torch

from fabricamp import Callback, ConfigError, DataModule, Trainer, TrainingModule, habits
from fabricamp.callbacks import (
    AsyncCheckpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from fabricamp.callbacks.early_stopping import EarlyStoppingReason
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.loggers import TensorBoardLogger
from fabricamp.strategies import DDP, Strategy
from tests.small import Classifier, loader, quiet_trainer

SCORES = (5.0, 4.0, 9.0, 3.0, 2.0)


class Scored(Classifier):
    """Logs the epoch's score."""

    def validation_step(self, batch, batch_idx):
        self.log("v", torch.tensor(SCORES[self.current_epoch]))


def fit(*callbacks, epochs=5, **options):
    trainer = quiet_trainer(callbacks=list(callbacks), max_epochs=epochs, enable_checkpointing=True, **options)
    trainer.fit(Scored(), loader(16), loader(8))
    return trainer


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def name_of(path):
    return os.path.basename(path)  # noqa: PTH119 - also of an empty path


def shown(checkpoint):
    return (
        {name_of(path): float(score) for path, score in checkpoint.best_k_models.items()},
        name_of(checkpoint.best_model_path),
        name_of(checkpoint.kth_best_model_path),
        name_of(checkpoint.last_model_path),
    )


class BestModel(ModelCheckpoint):
    """schnetpack's callback: chooses the files itself, and writes the best model to a separate file."""

    def __init__(self, model_path, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_path = model_path

    def on_validation_end(self, trainer, pl_module):
        self.task = pl_module
        super().on_validation_end(trainer, pl_module)

    def _update_best_and_save(self, current, trainer, monitor_candidates):
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        replaced = None
        if len(self.best_k_models) == k and k > 0:
            replaced = self.kth_best_model_path
            self.best_k_models.pop(replaced)
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        self.current_score = current
        self.best_k_models[path] = current
        if len(self.best_k_models) == k:
            self.kth_best_model_path = max(self.best_k_models, key=self.best_k_models.get)
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = min(self.best_k_models, key=self.best_k_models.get)
        self.best_model_score = self.best_k_models[self.best_model_path]
        self._save_checkpoint(trainer, path)
        if replaced is not None and path != replaced:
            self._remove_checkpoint(trainer, replaced)
        if current == self.best_model_score:
            torch.save({"epoch": trainer.current_epoch, **self.task.state_dict()}, self.model_path)


class Told(ModelCheckpoint):
    """Records the calls of Lightning's methods, and calls the base class."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def check_monitor_top_k(self, trainer, current=None):
        ranks = super().check_monitor_top_k(trainer, current)
        self.calls.append(("ranks", ranks))
        return ranks

    def _update_best_and_save(self, current, trainer, monitor_candidates):
        self.calls.append(("update", float(current)))
        super()._update_best_and_save(current, trainer, monitor_candidates)

    def _save_checkpoint(self, trainer, filepath):
        self.calls.append(("save", name_of(filepath)))
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer, filepath):
        self.calls.append(("remove", name_of(filepath)))
        super()._remove_checkpoint(trainer, filepath)


# -- a ModelCheckpoint


def test_a_callback_that_chooses_its_files_also_writes_the_best_model(tmp_path):
    best = tmp_path / "best.pt"
    checkpoint = BestModel(best, dirpath=tmp_path / "files", monitor="v", save_top_k=2)
    fit(checkpoint)
    assert torch.load(best)["epoch"] == 4
    assert names(tmp_path / "files") == ["epoch=3-step=16.ckpt", "epoch=4-step=20.ckpt"]
    scores = {"epoch=3-step=16.ckpt": 3, "epoch=4-step=20.ckpt": 2}
    assert shown(checkpoint) == (scores, "epoch=4-step=20.ckpt", "epoch=3-step=16.ckpt", "")
    assert (float(checkpoint.best_model_score), float(checkpoint.kth_value), float(checkpoint.current_score)) == (
        2,
        3,
        2,
    )
    (state,) = (one for key, one in read_checkpoint(checkpoint.best_model_path)["callbacks"].items() if "Best" in key)
    assert (float(state["best_model_score"]), float(state["kth_value"]), state["current_score"]) == (2, 3, 2)
    copied = pickle.loads(pickle.dumps(checkpoint))
    assert (shown(copied), copied.kth_value) == (shown(checkpoint), checkpoint.kth_value)


@pytest.mark.parametrize("kind", [BestModel, type("Async", (BestModel, AsyncCheckpoint), {})])
def test_it_goes_on_after_a_resume(kind, tmp_path):
    def resumed(epochs, **options):
        checkpoint = kind(tmp_path / "best.pt", dirpath=tmp_path / "files", monitor="v", save_top_k=2)
        trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(Scored(), loader(16), loader(8), **options)
        return checkpoint

    resumed(3)
    assert names(tmp_path / "files") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    checkpoint = resumed(5, ckpt_path="last")
    # The epochs after the newest file are repeated.  The file that the run resumed from stays.
    assert names(tmp_path / "files") == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt", "epoch=4-step=20.ckpt"]
    assert list(shown(checkpoint)[0].values()) == [3, 2]


def test_calls_and_files_with_last(tmp_path):
    checkpoint = Told(tmp_path, monitor="v", save_top_k=2, save_last=True)
    fit(checkpoint)
    assert checkpoint.calls == [
        *[("ranks", True), ("update", 5), ("save", "epoch=0-step=4.ckpt"), ("save", "last.ckpt")],
        *[("ranks", True), ("update", 4), ("save", "epoch=1-step=8.ckpt"), ("save", "last.ckpt")],
        ("ranks", False),
        *[("ranks", True), ("update", 3), ("save", "epoch=3-step=16.ckpt"), ("remove", "epoch=0-step=4.ckpt")],
        ("save", "last.ckpt"),
        *[("ranks", True), ("update", 2), ("save", "epoch=4-step=20.ckpt"), ("remove", "epoch=1-step=8.ckpt")],
        ("save", "last.ckpt"),
    ]
    assert names(tmp_path) == ["epoch=3-step=16.ckpt", "epoch=4-step=20.ckpt", "last.ckpt"]
    assert name_of(checkpoint.last_model_path) == "last.ckpt"


def test_calls_without_a_monitor_by_steps_and_with_a_link(tmp_path):
    newest = Told(tmp_path / "newest")
    steps = Told(tmp_path / "steps", monitor="v", every_n_train_steps=4, save_last=True)
    link = Told(tmp_path / "link", monitor="v", save_last="link")
    fit(newest, steps, link, epochs=3)
    assert newest.calls == [
        ("save", "epoch=0-step=4.ckpt"),
        *[("save", "epoch=1-step=8.ckpt"), ("remove", "epoch=0-step=4.ckpt")],
        *[("save", "epoch=2-step=12.ckpt"), ("remove", "epoch=1-step=8.ckpt")],
    ]
    assert steps.calls == [  # nothing at step 4, where the monitor has no value yet
        *[("ranks", True), ("update", 5), ("save", "epoch=1-step=8.ckpt"), ("save", "last.ckpt")],
        *[("ranks", True), ("update", 4), ("save", "epoch=2-step=12.ckpt"), ("remove", "epoch=1-step=8.ckpt")],
        ("save", "last.ckpt"),
    ]
    assert (tmp_path / "link" / "last.ckpt").readlink() == Path("epoch=1-step=8.ckpt")


def test_a_method_that_writes_a_folder(tmp_path):
    class Folder(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            Path(filepath).mkdir(parents=True)
            Path(filepath, "model").touch()

    checkpoint = Folder(tmp_path, monitor="v", mode="max")
    fit(checkpoint)
    assert names(tmp_path) == ["epoch=2-step=12.ckpt"]
    assert name_of(checkpoint.best_model_path) == "epoch=2-step=12.ckpt"


def test_a_method_that_is_set_on_the_object(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="v")
    seen = []
    checkpoint._save_topk_checkpoint = lambda trainer, candidates: seen.append(int(candidates["step"]))
    fit(checkpoint, epochs=2)
    assert (seen, names(tmp_path)) == ([4, 8], [])


def test_methods_that_a_hook_calls(tmp_path):
    class ByHand(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    checkpoint = ByHand(tmp_path, monitor="v", save_last=True)
    fit(checkpoint, epochs=4)
    assert names(tmp_path) == ["epoch=3-step=16.ckpt", "last.ckpt"]
    assert float(checkpoint.best_model_score) == 3


@pytest.mark.parametrize("kind", ["subclass", "plain, in a program written for Lightning"])
def test_what_is_assigned_counts_for_the_next_save(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING if kind != "subclass" else habits.NATIVE)
    family = type("Mine", (ModelCheckpoint,), {}) if kind == "subclass" else ModelCheckpoint
    checkpoint = family(tmp_path, monitor="v", save_top_k=1)

    class Forgets(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            checkpoint.best_k_models.clear()

    fit(Forgets(), checkpoint, epochs=3)
    assert list(shown(checkpoint)[0].values()) == [9], "the best of those that were not forgotten"


@pytest.mark.parametrize("family", [ModelCheckpoint, AsyncCheckpoint])
def test_a_dict_that_a_callback_empties_costs_no_file_of_a_class_without_an_override(tmp_path, family):
    checkpoint = family(tmp_path, monitor="v", mode="max", save_top_k=1)

    class Looks(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            checkpoint.best_k_models.clear()

    fit(Looks(), checkpoint)
    best = tmp_path / "epoch=2-step=12.ckpt"
    assert best.exists()
    assert checkpoint.best_model_path == str(best)
    assert list(checkpoint.best_k_models) == [str(best)]


def test_a_callback_may_call_the_methods_of_a_class_without_an_override(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="v", every_n_epochs=0, save_top_k=2)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            checkpoint._save_topk_checkpoint(trainer, checkpoint._monitor_candidates(trainer))

    fit(Saves(), checkpoint)
    assert names(tmp_path) == ["epoch=3-step=16.ckpt", "epoch=4-step=20.ckpt"]
    assert {name_of(path): float(score) for path, score in checkpoint.best_k_models.items()} == {
        "epoch=3-step=16.ckpt": 3,
        "epoch=4-step=20.ckpt": 2,
    }


def test_only_own_files_are_removed(tmp_path):
    foreign = tmp_path / "other.ckpt"
    write_checkpoint(foreign, {"state_dict": {}})

    class Removes(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            self._remove_checkpoint(trainer, str(foreign))

    with pytest.raises(
        ConfigError, match=r"_remove_checkpoint\('.*other.ckpt'\): this callback did not write that file"
    ):
        fit(Removes(tmp_path, monitor="v"), epochs=1)
    assert foreign.exists()


def test_a_file_that_a_checkpoint_names_stays(tmp_path):
    fit(Told(tmp_path / "first", monitor="v"), epochs=1)
    (first,) = (tmp_path / "first").iterdir()
    checkpoint = Told(tmp_path / "second", monitor="v")
    trainer = quiet_trainer(callbacks=[checkpoint], max_epochs=2, enable_checkpointing=True)
    trainer.fit(Scored(), loader(16), loader(8), ckpt_path=first)
    assert first.exists()
    assert names(tmp_path / "second") == ["epoch=1-step=8.ckpt"]


def test_the_list_as_yaml(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="v")
    assert float(checkpoint.kth_value) == float("inf")
    fit(checkpoint, epochs=1)
    checkpoint.to_yaml()
    assert (tmp_path / "best_k_models.yaml").read_text() == f"{tmp_path}/epoch=0-step=4.ckpt: 5.0\n"


def test_a_last_file_that_an_override_finds(tmp_path):
    class Finds(ModelCheckpoint):
        def _find_last_checkpoints(self, trainer):
            return {str(tmp_path / "elsewhere" / "end.ckpt")}

    trainer = fit(ModelCheckpoint(tmp_path / "files"), epochs=1)
    trainer.save_checkpoint(tmp_path / "elsewhere" / "end.ckpt")
    trainer = quiet_trainer(callbacks=[Finds(tmp_path / "none")], max_epochs=2, enable_checkpointing=True)
    trainer.fit(Scored(), loader(16), loader(8), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "elsewhere" / "end.ckpt")


def test_two_ranks_save_and_remove_the_same_files(tmp_path):
    class Noted(Told):
        def on_train_end(self, trainer, pl_module):
            super().on_train_end(trainer, pl_module)
            (tmp_path / f"calls of {trainer.global_rank}").write_text(repr(self.calls))

    checkpoint = Noted(tmp_path / "files", monitor="v", save_last=True)
    fit(checkpoint, epochs=3, devices=2, strategy="ddp", start_method="fork")
    assert names(tmp_path / "files") == ["epoch=1-step=4.ckpt", "last.ckpt"]
    calls = (tmp_path / "calls of 0").read_text()
    assert calls == (tmp_path / "calls of 1").read_text()
    assert "('remove', 'epoch=0-step=2.ckpt')" in calls


# -- an EarlyStopping


def test_an_early_stopping_that_decides_by_itself():
    class Third(EarlyStopping):
        def _evaluate_stopping_criteria(self, current):
            self.wait_count += 1
            return self.wait_count >= 3, "the third"

    stopping = Third("v")
    trainer = fit(stopping)
    assert (stopping.wait_count, stopping.stopped_epoch, stopping.stopping_reason_message) == (3, 2, "the third")
    assert trainer.current_epoch == 3


def test_all_ranks_stop_if_one_decides_so(tmp_path):
    class OfRankOne(EarlyStopping):
        def _evaluate_stopping_criteria(self, current):
            return torch.distributed.get_rank() == 1, "rank 1 has enough"

    trainer = fit(OfRankOne("v"), devices=2, strategy="ddp", start_method="fork", default_root_dir=tmp_path)
    assert trainer.current_epoch == 1


def test_an_early_stopping_that_looks_on():
    calls = []

    class Looks(EarlyStopping):
        def _run_early_stopping_check(self, trainer):
            calls.append("check")
            super()._run_early_stopping_check(trainer)

        def _evaluate_stopping_criteria(self, current):
            calls.append((float(current), float(self.best_score), self.min_delta))
            return super()._evaluate_stopping_criteria(current)

        def _validate_condition_metric(self, logs):
            assert self.monitor_op is torch.lt
            return super()._validate_condition_metric(logs)

    stopping = Looks("v", min_delta=0.5, patience=1)
    fit(stopping)
    assert calls == ["check", (5, float("inf"), -0.5), "check", (4, 5, -0.5), "check", (9, 4, -0.5)]
    assert (stopping.stopped_epoch, stopping.stopping_reason) == (2, EarlyStoppingReason.PATIENCE_EXHAUSTED)


def test_its_best_score_can_be_set():
    stopping = EarlyStopping("v", patience=1)
    stopping.best_score = torch.tensor(1.0)
    fit(stopping)
    assert stopping.stopped_epoch == 0
    assert float(stopping.best_score) == 1


# -- other private methods


class Mixin:
    def _run_stage(self):
        """A private method that Lightning's Trainer calls."""


@pytest.mark.parametrize(
    ("base", "method", "lightnings"),
    [
        (TrainingModule, "_call_batch_hook", "LightningModule"),
        (DataModule, "_set_hparams", "LightningDataModule"),
        (Callback, "_legacy_state_key", "Callback"),
        (ModelCheckpoint, "_generate_state_key", "Checkpoint"),
        (Trainer, "_run", "Trainer"),
        (LearningRateMonitor, "_add_prefix", "LearningRateMonitor"),
        (ThroughputMonitor, "_update", "ThroughputMonitor"),
        (TensorBoardLogger, "_get_next_version", "TensorBoardLogger"),
        (Strategy, "_setup_model", "Strategy"),
        (DDP, "_register_ddp_hooks", "DDPStrategy"),
    ],
)
def test_an_override_that_nothing_would_call_is_refused(base, method, lightnings):
    mine = type("Mine", (base,), {method: lambda self: None})  # a library may define it, and nobody use it
    for kind in (mine, type("Further", (mine,), {})):
        with pytest.raises(
            ConfigError, match=rf"Mine\.{method} overrides a private method of Lightning's {lightnings}"
        ):
            kind()
    type("Mine", (base,), {"_of_mine": lambda self: None, method + "_of_mine": property(lambda self: None)})


def test_an_override_by_a_base_class_is_refused():
    with pytest.raises(ConfigError, match=r"Mixin\._run_stage overrides a private method of Lightning's Trainer"):
        type("Mine", (Mixin, Trainer), {})()


class Watches(LearningRateMonitor):
    """A callback for fabricamp with private methods that have Lightning's names by chance."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print(max([batch_idx], key=lambda step: self._add_prefix(step) or step))

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        self._add_suffix()

    @property
    def longest(self):
        return self._extract_lr()

    def _add_prefix(self, step): ...
    def _add_suffix(self): ...
    def _extract_lr(self): ...


def test_a_name_that_the_program_itself_calls_is_its_own(monkeypatch):
    methods = dict(vars(Watches))
    assert type("Again", (Watches,), {"_extract_lr": lambda self: 1})
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
    with pytest.raises(ConfigError, match=r"overrides a private method of Lightning's LearningRateMonitor"):
        type("Watches", (LearningRateMonitor,), methods)()


def test_an_override_that_only_calls_its_base_is_refused():
    class Mine(LearningRateMonitor):
        def _extract_lr(self, *args):
            return super()._extract_lr(*args)

        def on_train_start(self, trainer, pl_module): ...

    with pytest.raises(ConfigError, match=r"Mine\._extract_lr overrides"):
        Mine()


def test_the_list_is_that_of_lightnings_source(tmp_path, monkeypatch):
    spec = importlib.util.find_spec("lightning")
    site = Path(spec.origin).parents[1] if spec and spec.origin else Path()
    version = site / "lightning" / "version.info"
    if not version.is_file() or version.read_text().strip() != "2.6.6":
        pytest.skip("needs an installed Lightning 2.6.6")
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "tools" / "write_lightning_methods.py"))
    target = tmp_path / "written.toml"
    monkeypatch.setitem(script["main"].__globals__, "TARGET", target)
    script["main"](site)
    assert target.read_text() == (root / "fabricamp" / "arguments" / "lightning_methods.toml").read_text()
