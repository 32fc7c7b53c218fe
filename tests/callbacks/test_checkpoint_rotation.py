"""ModelCheckpoint over real files: the kept files, also after failures, interruptions and resumes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from fabricamp.callbacks import ModelCheckpoint, _checkpoint_files
from fabricamp.checkpoint import read_checkpoint
from fabricamp.errors import CheckpointError
from fabricamp.state import TrainerFn
from tests.small import Classifier, loader, quiet_trainer


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def step_in(path) -> int:
    return read_checkpoint(path)["global_step"]


# -- kept files


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_the_best_k_and_the_newest_two_stay(make_trainer, make, folder, mode, sign):
    checkpoint = make(monitor="x", mode=mode, save_top_k=2, filename="{x:.0f}", auto_insert_metric_name=False)
    trainer = make_trainer(checkpoint).start()
    seen = []
    current = []
    assert checkpoint.current_score is None
    for value in (5.0, 4.0, 9.0, 3.0, float("nan"), 2.0):
        trainer.epoch(x=sign * value)
        seen.append([abs(int(name[:-5])) for name in names(folder)])
        current.append(checkpoint.current_score.item() * sign)
    assert current == [5, 4, 4, 3, 3, 2], "the score of the file that was saved last, as in Lightning"
    assert [sorted(one) for one in seen] == [[5], [4, 5], [4, 5], [3, 4], [3, 4], [2, 3]]
    assert checkpoint.best_model_path == str(folder / f"{2 * sign}.ckpt")
    assert checkpoint.best_model_score.item() == 2 * sign
    assert checkpoint.kth_best_model_path == str(folder / f"{3 * sign}.ckpt")
    assert checkpoint.kth_value.item() == 3 * sign
    assert list(checkpoint.best_k_models) == [str(folder / f"{2 * sign}.ckpt"), str(folder / f"{3 * sign}.ckpt")]


def test_all_stay_with_minus_one(make_trainer, make, folder):
    checkpoint = make(monitor="x", save_top_k=-1)
    trainer = make_trainer(checkpoint).start()
    for value in (1.0, 2.0, 0.5, 3.0):
        trainer.epoch(x=value)
    assert len(names(folder)) == 4
    assert checkpoint.best_model_score.item() == 0.5
    assert checkpoint.kth_best_model_path == ""


def test_a_step_can_be_the_monitor(make_trainer, make, folder):
    trainer = make_trainer(make(monitor="step", mode="max", save_top_k=3)).start()
    for _ in range(5):
        trainer.epoch()
    assert names(folder) == ["epoch=2-step=3.ckpt", "epoch=3-step=4.ckpt", "epoch=4-step=5.ckpt"]


def test_the_old_goes_only_after_the_new_is_there_and_a_failure_changes_nothing(make_trainer, make, folder):
    checkpoint = make(monitor="x")
    trainer = make_trainer(checkpoint).start()
    trainer.epoch(x=3.0)
    trainer.epoch(x=2.0)
    before, best = names(folder), checkpoint.best_model_path
    trainer.failure = "no space"
    with pytest.raises(CheckpointError, match="no space"):
        trainer.epoch(x=1.0)
    assert (names(folder), checkpoint.best_model_path) == (before, best)
    assert checkpoint.state_dict()["best_model_path"] == best


def test_the_path_is_published_after_the_write_but_the_file_knows_itself(make_trainer, make, folder):
    checkpoint = make(monitor="x")
    trainer = make_trainer(checkpoint).start()
    save, during = trainer.save_checkpoint, []

    def watch(path, weights_only=False):
        during.append(checkpoint.best_model_path)
        save(path, weights_only)

    trainer.save_checkpoint = watch
    trainer.epoch(x=1.0)
    assert during == [""]
    inside = read_checkpoint(checkpoint.best_model_path)["callbacks"][checkpoint.state_key]
    assert inside["best_model_path"] == checkpoint.best_model_path
    assert inside["best_k_models"] == {checkpoint.best_model_path: 1.0}


def test_a_file_that_cannot_be_removed_is_a_warning(make_trainer, make, folder, monkeypatch):
    trainer = make_trainer(make()).start()
    for _ in range(2):
        trainer.epoch()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(trainer, "save_checkpoint", lambda path, weights_only: Path(path).write_text(""))
    with pytest.warns(RuntimeWarning, match=r"epoch=0-step=1\.ckpt: Permission denied"):
        trainer.epoch()


# -- save_last


def test_save_last_is_a_copy_of_the_newest(make_trainer, make, folder):
    checkpoint = make(save_last=True)
    trainer = make_trainer(checkpoint).start()
    for _ in range(4):
        trainer.epoch()
    assert names(folder) == ["epoch=2-step=3.ckpt", "epoch=3-step=4.ckpt", "last.ckpt"]
    assert step_in(folder / "last.ckpt") == 4
    assert checkpoint.last_model_path == str(folder / "last.ckpt")
    assert len(trainer.saved) == 4, "written once each"


def test_save_last_alone_keeps_the_one_before(make_trainer, make, folder):
    trainer = make_trainer(make(save_last=True, save_top_k=0)).start()
    for count in range(1, 5):
        trainer.epoch()
        assert sorted(step_in(folder / name) for name in names(folder)) == list(range(max(1, count - 1), count + 1))
        assert step_in(folder / "last.ckpt") == count


def test_save_last_follows_although_the_score_is_bad(make_trainer, make, folder):
    checkpoint = make(save_last=True, monitor="x")
    trainer = make_trainer(checkpoint).start()
    for value in (1.0, 2.0, 3.0, 4.0):
        trainer.epoch(x=value)
    assert step_in(folder / "last.ckpt") == 4
    assert step_in(checkpoint.best_model_path) == 1
    assert sorted(step_in(folder / name) for name in names(folder)) == [1, 3, 4]
    trainer.epoch(x=0.5)
    trainer.epoch(x=0.4)
    assert step_in(folder / "last.ckpt") == 6
    assert sorted(step_in(folder / name) for name in names(folder)) == [5, 6, 6]


def test_the_last_one_s_name_may_hold_metrics(make_trainer, folder):
    class Mine(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "{epoch}-last"

    trainer = make_trainer(Mine(dirpath=folder, save_last=True, save_top_k=0)).start()
    for _ in range(4):
        trainer.epoch()
    assert names(folder) == ["epoch=2-last.ckpt", "epoch=3-last.ckpt"]


def test_link(make_trainer, make, folder):
    trainer = make_trainer(make(save_last="link", monitor="x")).start()
    for value in (3.0, 2.0, 1.0):
        trainer.epoch(x=value)
    assert (folder / "last.ckpt").readlink() == Path("epoch=2-step=3.ckpt")
    trainer.epoch(x=9.0)
    assert step_in(folder / "last.ckpt") == 3
    assert len(names(folder)) == 3


def test_an_error_of_rank_0_reaches_every_rank(make_trainer, make, monkeypatch):
    def refuse(*_):
        raise CheckpointError("quota")

    monkeypatch.setattr(_checkpoint_files, "copy_checkpoint", refuse)
    trainer = make_trainer(make(save_last=True)).start()
    with pytest.raises(CheckpointError, match="quota"):
        trainer.epoch()


# -- resuming


def test_a_resumed_run_goes_on_rotating_where_the_other_stopped(make_trainer, make, folder):
    trainer = make_trainer(make(monitor="x", save_last=True)).start()
    for value in (5.0, 4.0, 3.0):
        trainer.epoch(x=value)
    resumed = make(monitor="x", save_last=True)
    trainer = make_trainer(resumed)
    trainer.state.epoch = 3
    trainer.resume(folder / "last.ckpt")
    assert resumed.best_model_score.item() == 3
    trainer.epoch(x=9.0)
    assert step_in(resumed.best_model_path) == 3
    trainer.epoch(x=2.0)
    trainer.epoch(x=1.0)
    assert names(folder) == ["epoch=4-step=5.ckpt", "epoch=5-step=6.ckpt", "last.ckpt"]


def test_a_run_killed_before_it_rotated_leaves_nothing_behind(make_trainer, make, folder, monkeypatch):
    trainer = make_trainer(make()).start()
    for _ in range(2):
        trainer.epoch()
    monkeypatch.setattr(_checkpoint_files.SavePlan, "rotate", lambda *_, **__: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        trainer.epoch()
    monkeypatch.undo()
    assert len(names(folder)) == 3
    trainer = make_trainer(make())
    trainer.state.epoch = 3
    trainer.resume(folder / "epoch=2-step=3.ckpt")
    trainer.epoch()
    assert names(folder) == ["epoch=2-step=3.ckpt", "epoch=3-step=4.ckpt"]


def test_the_file_resumed_from_stays_while_this_run_lasts(make_trainer, make, folder):
    trainer = make_trainer(make()).start()
    trainer.epoch()
    source = folder / "epoch=0-step=1.ckpt"
    trainer = make_trainer(make())
    trainer.state.epoch = 1
    trainer.resume(source)
    for _ in range(4):
        trainer.epoch()
    assert names(folder) == ["epoch=0-step=1.ckpt", "epoch=3-step=4.ckpt", "epoch=4-step=5.ckpt"]


def test_files_of_another_folder_are_ranked_but_never_removed(make_trainer, make, folder, tmp_path):
    trainer = make_trainer(make(monitor="x")).start()
    for value in (3.0, 2.0):
        trainer.epoch(x=value)
    other = ModelCheckpoint(dirpath=tmp_path / "other", monitor="x")
    trainer = make_trainer(other).resume(folder / "epoch=1-step=2.ckpt")
    trainer.epoch(x=2.5)
    assert names(tmp_path / "other") == []
    for value in (1.0, 0.5, 0.4):
        trainer.epoch(x=value)
    assert names(folder) == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]
    assert len(names(tmp_path / "other")) == 2


def test_a_run_killed_between_moving_the_last_one_aside_and_writing_it_anew(make_trainer, make, folder):
    trainer = make_trainer(make(save_last=True, save_top_k=0)).start()
    trainer.epoch()
    trainer.save_checkpoint = lambda *_, **__: (_ for _ in ()).throw(SystemExit)
    with pytest.raises(SystemExit):
        trainer.epoch()
    assert [step_in(folder / name) for name in names(folder)] == [1, 1]
    trainer = make_trainer(make(save_last=True, save_top_k=0)).resume(folder / "last.ckpt")
    for count in (2, 3):
        trainer.epoch()
        assert {step_in(folder / name) for name in names(folder)} == {count - 1, count}


def test_files_that_somebody_removed_are_forgotten(make_trainer, make, folder):
    checkpoint = make(monitor="x")
    trainer = make_trainer(checkpoint).start()
    trainer.epoch(x=1.0)
    Path(checkpoint.best_model_path).unlink()
    trainer.epoch(x=2.0)
    assert checkpoint.best_model_score.item() == 2


def test_lightning_s_state_is_understood(folder):
    checkpoint = ModelCheckpoint(monitor="x", save_top_k=2)
    checkpoint.load_state_dict(
        {
            "monitor": "x",
            "best_model_score": torch.tensor(0.5),
            "best_model_path": "/a/best.ckpt",
            "current_score": torch.tensor(0.7),
            "dirpath": "/a",
            "best_k_models": {"/a/best.ckpt": torch.tensor(0.5), "/a/second.ckpt": torch.tensor(0.7)},
            "kth_best_model_path": "/a/second.ckpt",
            "kth_value": torch.tensor(0.7),
            "last_model_path": "",
        }
    )
    assert checkpoint.best_model_path == "/a/best.ckpt"
    assert checkpoint.kth_value.item() == pytest.approx(0.7)
    assert checkpoint.current_score.item() == pytest.approx(0.7)


def test_the_state_key_tells_callbacks_apart_and_another_pace_is_accepted():
    keys = {
        ModelCheckpoint(**options).state_key
        for options in (
            {},
            {"monitor": "x"},
            {"monitor": "x", "mode": "max"},
            {"every_n_train_steps": 5},
            {"every_n_train_steps": 9},
            {"train_time_interval": timedelta(1)},
            {"filename": "{epoch}"},
        )
    }
    assert len(keys) == 7
    five, nine = ModelCheckpoint(every_n_train_steps=5), ModelCheckpoint(every_n_train_steps=9)
    assert five.accepts_state_of(nine.state_key)
    assert not five.accepts_state_of(ModelCheckpoint(monitor="x", every_n_train_steps=9).state_key)
    assert not five.accepts_state_of(ModelCheckpoint(every_n_epochs=5).state_key)


# -- interruptions


def test_ctrl_c_writes_the_checkpoint_of_that_step(make_trainer, make, folder):
    checkpoint = make(monitor="x")
    trainer = make_trainer(checkpoint).start()
    trainer.epoch(x=1.0)
    trainer.step()
    trainer.interrupt()
    assert names(folder) == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]
    assert checkpoint.last_model_path == str(folder / "epoch=1-step=2.ckpt")
    assert checkpoint.best_model_path == str(folder / "epoch=0-step=1.ckpt")
    assert step_in(checkpoint.last_model_path) == 2

    resumed = make_trainer(make(monitor="x"))
    resumed.state.epoch = 1
    resumed.resume(checkpoint.last_model_path)
    for value in (0.5, 0.4, 0.3):
        resumed.epoch(x=value)
    assert "epoch=0-step=1.ckpt" not in names(folder)


def test_ctrl_c_at_a_step_that_is_saved_already(make_trainer, make, folder):
    checkpoint = make()
    trainer = make_trainer(checkpoint).start()
    trainer.interrupt()
    assert names(folder) == []
    trainer.epoch()
    trainer.interrupt()
    assert len(trainer.saved) == 1
    assert checkpoint.last_model_path == checkpoint.best_model_path


def test_ctrl_c_with_save_last(make_trainer, make, folder):
    checkpoint = make(save_last=True, monitor="later")
    trainer = make_trainer(checkpoint).start()
    trainer.step()
    trainer.interrupt()
    assert checkpoint.last_model_path == str(folder / "last.ckpt")
    assert step_in(folder / "last.ckpt") == 1


@pytest.mark.parametrize("wanted", [False, True])
def test_other_exceptions_only_where_wanted(make_trainer, make, folder, wanted):
    trainer = make_trainer(make(save_on_exception=wanted)).start()
    trainer.step()
    trainer.interrupt(ValueError())
    assert len(names(folder)) == wanted


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_that_failed_goes_on_from_where_it_was(folder, wanted):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 5 and not saved:
                raise ValueError("a step")
            return super().training_step(batch, batch_idx)

    def fit(module, **options):
        trainer = quiet_trainer(
            max_epochs=1, enable_checkpointing=True, callbacks=ModelCheckpoint(folder, save_on_exception=wanted)
        )
        trainer.fit(module, loader(), **options)
        return [one.tolist() for one in module.parameters()]

    saved = []
    with pytest.raises(ValueError, match="a step"):
        fit(Fails())
    assert [step_in(folder / name) for name in names(folder)] == [5] * wanted
    saved += names(folder)
    if wanted:
        assert fit(Fails(), ckpt_path="auto") == fit(Classifier())


def test_no_checkpoint_where_none_is_wanted_or_nothing_was_trained(make_trainer, make):
    trainer = make_trainer(make(save_top_k=0)).start()
    trainer.step()
    trainer.interrupt()
    trainer.state.begin(TrainerFn.TESTING)
    trainer.interrupt()
    assert not trainer.saved


def test_of_equal_scores_the_older_file_is_the_next_to_go(make_trainer, make, folder):
    """As in Lightning.  Scores are shown in fp32, although they are compared with all digits."""
    checkpoint = make(monitor="loss", save_top_k=3, filename="{step}")
    trainer = make_trainer(checkpoint).start()
    for loss in (1.0, 2.0, 2.0):
        trainer.epoch(loss=loss)
    assert Path(checkpoint.kth_best_model_path).name == "step=2.ckpt"
    assert {one.dtype for one in checkpoint.best_k_models.values()} == {torch.float32}
    assert (checkpoint.best_model_score.dtype, checkpoint.kth_value.dtype) == (torch.float32, torch.float32)
    trainer.epoch(loss=1.5)
    assert [Path(one).name for one in checkpoint.best_k_models] == ["step=1.ckpt", "step=4.ckpt", "step=3.ckpt"]
