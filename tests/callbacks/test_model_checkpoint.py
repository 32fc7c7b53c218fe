"""ModelCheckpoint over real files: when it writes, under which name, and which arguments it refuses."""

from __future__ import annotations

import pickle
import string
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from fabricamp.arguments import cadence as file_of_the_class
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.errors import ConfigError
from fabricamp.state import RunningStage, TrainerFn
from fabricamp.strategies import Environment
from tests.small import Classifier, loader, quiet_trainer

if TYPE_CHECKING:
    from pathlib import Path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def step_in(path) -> int:
    return read_checkpoint(path)["global_step"]


# -- when it writes


def test_by_default_every_epoch_and_the_newest_two_stay(make_trainer, make, folder):
    checkpoint = make()
    trainer = make_trainer(checkpoint).start()
    seen = []
    for _ in range(4):
        trainer.epoch(steps=3, val_loss=1.0)
        seen.append(names(folder))
    assert seen == [
        ["epoch=0-step=3.ckpt"],
        ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"],
        ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt"],
        ["epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt"],
    ]
    assert checkpoint.best_model_path == str(folder / "epoch=3-step=12.ckpt")
    assert (checkpoint.best_model_score, checkpoint.last_model_path) == (None, "")
    assert trainer.saved[0] == (str(folder / "epoch=0-step=3.ckpt"), False)


def test_every_n_epochs(make_trainer, make, folder):
    trainer = make_trainer(make(every_n_epochs=3, save_top_k=-1)).start()
    for _ in range(7):
        trainer.epoch()
    assert names(folder) == ["epoch=2-step=3.ckpt", "epoch=5-step=6.ckpt"]


def test_every_n_train_steps_counts_windows_not_micro_batches(make_trainer, make, folder):
    trainer = make_trainer(make(every_n_train_steps=4, save_top_k=-1)).start()
    for _ in range(9):
        trainer.step(micro_batches=3)
    assert names(folder) == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"]
    trainer.epoch(val_loss=1.0)
    assert len(trainer.saved) == 2


def test_a_resumed_run_keeps_to_the_same_steps(make_trainer, make, folder):
    trainer = make_trainer(make(every_n_train_steps=4, save_top_k=-1))
    trainer.state.global_step = 6
    trainer.start()
    for _ in range(6):
        trainer.step()
    assert names(folder) == ["epoch=0-step=12.ckpt", "epoch=0-step=8.ckpt"]


def test_time_is_rank_0_s_and_asked_for_ever_more_seldom(make_trainer, make, folder, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(file_of_the_class.time, "monotonic", lambda: clock[0])
    checkpoint = make(train_time_interval=timedelta(seconds=100), save_top_k=-1)
    trainer = make_trainer(checkpoint).start()
    trainer.strategy.broadcasts = 0
    for _ in range(250):
        clock[0] += 1.0
        trainer.step()
    assert [step_in(path) for path, _ in trainer.saved] == [100, 200]
    looks = trainer.strategy.broadcasts - 3 * 2  # each of the two saves makes three broadcasts
    assert looks < 40, "not one a step"

    clock[0] += 1000.0
    for _ in range(30):
        clock[0] += 1.0
        trainer.step()
    assert len(trainer.saved) == 3


def test_no_time_between_two_saves_is_a_save_after_each_step(make_trainer, make):
    checkpoint = make(train_time_interval=timedelta(0), save_top_k=-1)
    trainer = make_trainer(checkpoint).start()
    for _ in range(3):
        trainer.step(micro_batches=2)
    assert [step_in(path) for path, _ in trainer.saved] == [1, 2, 3]
    assert "'cadence': 'time'" in checkpoint.state_key


def test_time_without_a_good_enough_score_is_not_asked_again_at_once(make_trainer, make, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(file_of_the_class.time, "monotonic", lambda: clock[0])
    trainer = make_trainer(make(train_time_interval=timedelta(seconds=10), monitor="val_loss")).start()
    trainer.callback_metrics["val_loss"] = torch.tensor(1.0)
    for _ in range(31):
        clock[0] += 1.0
        trainer.step()
    assert len(trainer.saved) == 1  # an equal score is not better


@pytest.mark.parametrize(
    ("every", "steps", "epochs", "seconds"),
    [
        ("100 steps, 1 epoch, 30 min", 100, 1, 1800),
        ("1 step", 1, 0, None),
        ("2epochs", 0, 2, None),
        ("1.5 hours,5 steps", 5, 0, 5400),
        ("90 s", 0, 0, 90),
        ("2 days", 0, 0, 172_800),
        ("1 h", 0, 0, 3600),
    ],
)
def test_every_says_all_of_when(every, steps, epochs, seconds):
    checkpoint = ModelCheckpoint(every=every)
    interval = None if seconds is None else timedelta(seconds=seconds)
    assert (checkpoint.every_n_train_steps, checkpoint.every_n_epochs) == (steps, epochs)
    assert checkpoint.train_time_interval == interval


def test_every_saves_at_each_of_its_times_and_once_where_they_meet(make_trainer, make, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(file_of_the_class.time, "monotonic", lambda: clock[0])
    trainer = make_trainer(make(every="4 steps, 1 epoch, 25 s", save_top_k=-1, monitor="step")).start()
    for _ in range(3):
        for _ in range(6):
            clock[0] += 3.0
            trainer.step()
        trainer.epoch(steps=0, val_loss=1.0)
    # Steps 4, 8, 12, 16; the epochs' ends 6, 12, 18; 25 s have passed at step 9 (27 s), the next 25 s (52 s) at step 18.
    assert [step_in(path) for path, _ in trainer.saved] == [4, 6, 8, 9, 12, 16, 18]


@pytest.mark.parametrize(
    ("settings", "val_batches", "on_train_epoch_end", "saves_at"),
    [
        ((1.0, 1), [4], None, "epoch"),
        ((0.5, 1), [4], None, "validation"),
        ((1, 1), [4], None, "validation"),
        ((1.0, 2), [4], None, "validation"),
        ((1.0, 2), [0], None, "epoch"),
        ((0.5, 1), [], None, "epoch"),
        ((1.0, 1), [4], False, "validation"),
        ((0.5, 1), [4], True, "epoch"),
    ],
)
def test_where_an_epoch_s_checkpoint_is_written(
    make_trainer, make, settings, val_batches, on_train_epoch_end, saves_at
):
    checkpoint = make(save_on_train_epoch_end=on_train_epoch_end)
    trainer = make_trainer(checkpoint).start()
    trainer.val_check_interval, trainer.check_val_every_n_epoch = settings
    trainer.num_val_batches = val_batches
    trainer.step()
    checkpoint.on_validation_end(trainer, None)
    after_validation = len(trainer.saved)
    checkpoint.on_train_epoch_end(trainer, None)
    assert (after_validation, len(trainer.saved)) == ((0, 1) if saves_at == "epoch" else (1, 1))


@pytest.mark.parametrize(
    ("fn", "stage"),
    [(TrainerFn.FITTING, RunningStage.SANITY_CHECKING), (TrainerFn.VALIDATING, RunningStage.VALIDATING)],
)
def test_validation_outside_training_writes_nothing(make_trainer, make, fn, stage):
    trainer = make_trainer(make(save_on_train_epoch_end=False)).start()
    trainer.step()
    trainer.state.fn, trainer.state.stage = fn, stage
    trainer.validate(val_loss=1.0)
    assert not trainer.saved


@pytest.mark.parametrize("options", [{"save_top_k": 0}, {"every_n_epochs": 0}])
def test_nothing_where_nothing_is_wanted(make_trainer, make, folder, options):
    trainer = make_trainer(make(**options)).start()
    for _ in range(3):
        trainer.epoch(val_loss=1.0)
    assert names(folder) == []


def test_fast_dev_run_writes_nothing(make_trainer, make, folder):
    trainer = make_trainer(make())
    trainer.fast_dev_run = True
    trainer.start().epoch(val_loss=1.0)
    assert names(folder) == []


def test_fast_dev_run_keeps_the_callback_which_leaves_the_folder_as_it_is(tmp_path):
    def trainer(**options):
        kept = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
        return quiet_trainer(enable_checkpointing=True, callbacks=[kept], **options)

    trainer(max_epochs=1).fit(Classifier(), loader(), loader())
    files = names(tmp_path)
    trial = trainer(fast_dev_run=True)
    trial.fit(Classifier(), loader(), loader())
    assert trial.checkpoint_callback.best_model_path == trial.checkpoint_callback.last_model_path == ""
    trainer(fast_dev_run=True).fit(Classifier(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert names(tmp_path) == files
    assert quiet_trainer(fast_dev_run=True, enable_checkpointing=True).checkpoint_callback.best_model_path == ""


# -- names


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "epoch=2-step=7.ckpt"),
        ({"filename": "{epoch:02d}-{val/loss:.2f}"}, "epoch=02-val_loss=0.12.ckpt"),
        ({"filename": "m-{epoch}-{val/loss:.3f}", "auto_insert_metric_name": False}, "m-2-0.125.ckpt"),
        ({"filename": "plain{{x}}"}, "plain{x}.ckpt"),
        ({"filename": "sub/{step:d}"}, "sub/step=7.ckpt"),
        ({"filename": "{count:d}"}, "count=4.ckpt"),
        ({"filename": "{later:.2f}"}, "later=0.00.ckpt"),
        ({"filename": "{later:d}"}, "later=0.ckpt"),
        ({"filename": "{later}"}, "later=0.ckpt"),
    ],
)
def test_names(options, name):
    metrics = {"epoch": 2, "step": 7, "val/loss": torch.tensor(0.125), "count": torch.tensor(4.0)}
    assert ModelCheckpoint(**options).format_checkpoint_name(metrics) == name


def test_a_name_is_parsed_once(make_trainer, make, monkeypatch):
    parse, parsed = string.Formatter.parse, []
    monkeypatch.setattr(string.Formatter, "parse", lambda self, text: parsed.append(text) or parse(self, text))
    filename = "{epoch}-{step:03d}-of-a-name-that-is-parsed-once"
    checkpoint = make(filename=filename, every="1 steps", save_last=True, auto_insert_metric_name=False)
    checkpoint.CHECKPOINT_NAME_LAST = last = "the-last-of-{step}-names"
    trainer = make_trainer(checkpoint).start()
    for _ in range(8):
        trainer.step()
    assert checkpoint.best_model_path.endswith("0-008-of-a-name-that-is-parsed-once.ckpt")
    assert (parsed.count(filename), parsed.count(last)) == (1, 1)
    checkpoint.filename = "renamed-{step}"
    trainer.step()
    assert checkpoint.best_model_path.endswith("renamed-9.ckpt"), "a name that is assigned later counts"


def test_a_name_takes_a_version_and_the_class_s_characters():
    class Mine(ModelCheckpoint):
        CHECKPOINT_JOIN_CHAR = "_"
        CHECKPOINT_EQUALS_CHAR = ":"
        FILE_EXTENSION = ".pt"

    assert Mine().format_checkpoint_name({"epoch": 1, "step": 2}, ver=3) == "epoch:1_step:2_v3.pt"


def test_a_second_run_in_the_same_folder_leaves_the_first_s_files_alone(make_trainer, make, folder):
    for _ in range(2):
        trainer = make_trainer(make(save_last=True)).start()
        for _ in range(4):
            trainer.epoch()
    first = ["epoch=2-step=3.ckpt", "epoch=3-step=4.ckpt", "last.ckpt"]
    second = ["epoch=2-step=3-v1.ckpt", "epoch=3-step=4-v1.ckpt", "last-v1.ckpt"]
    assert names(folder) == sorted(first + second)


def test_without_the_version_counter_the_name_is_taken_over(make_trainer, make, folder):
    for _ in range(2):
        trainer = make_trainer(make(enable_version_counter=False)).start()
        trainer.epoch()
    assert names(folder) == ["epoch=0-step=1.ckpt"]


def test_a_name_without_fields_shows_the_best_and_the_one_before_stays_beside_it(make_trainer, make, folder):
    checkpoint = make(filename="best", monitor="x")
    trainer = make_trainer(checkpoint).start()
    for value in (5.0, 4.0, 6.0, 3.0, 2.0):
        trainer.epoch(x=value)
        assert len(names(folder)) <= 2
        assert checkpoint.best_model_path == str(folder / "best.ckpt")
    assert step_in(folder / "best.ckpt") == 5
    (spare,) = set(names(folder)) - {"best.ckpt"}
    assert step_in(folder / spare) == 4
    assert spare.startswith("best-previous")


def test_a_name_without_fields_keeps_its_version_in_a_second_run(make_trainer, make, folder):
    for fresh in ("best.ckpt", "best-v1.ckpt"):
        checkpoint = make(filename="best", monitor="x")
        trainer = make_trainer(checkpoint).start()
        for value in (5.0, 4.0, 3.0):
            trainer.epoch(x=value)
            assert checkpoint.best_model_path == str(folder / fresh)
    assert len(names(folder)) == 4


def test_names_without_fields_in_a_top_3(make_trainer, make, folder):
    trainer = make_trainer(make(filename="m", monitor="step", mode="max", save_top_k=3)).start()
    for _ in range(5):
        trainer.epoch()
        assert len(names(folder)) <= 3
    assert sorted(step_in(folder / name) for name in names(folder)) == [3, 4, 5]


# -- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "auto"}, "'min'.*'max'"),
        ({"save_top_k": -2}, "-1 for all"),
        ({"save_top_k": 3}, "without a monitor"),
        ({"save_last": "copy"}, "'link'"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": 1, "every_n_train_steps": 2}, "every_n_train_steps and every_n_epochs"),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(1)}, "choose one"),
        ({"train_time_interval": timedelta(-1)}, "timedelta"),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(0)}, "choose one"),
        ({"train_time_interval": 30}, r"timedelta\(minutes=30\)"),
        ({"every": "30 mins, 10 stepps"}, "'10 stepps' cannot be read; did you mean 'steps'"),
        ({"every": "ten steps"}, "'ten steps' cannot be read; write it like"),
        ({"every": ""}, "cannot be read"),
        ({"every": "1.5 epochs"}, "'1.5 epochs' is not allowed"),
        ({"every": "0 steps"}, "more than 0"),
        ({"every": "1 h, 30 min"}, "at most once"),
        ({"every": "1 epoch", "every_n_epochs": 1}, "leave every_n_train_steps.*out"),
        ({"filename": "{epoch"}, "not a template"),
        ({"filename": "{}"}, "empty"),
        ({"filename": "{loss:.2q}"}, "'.2q'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        ModelCheckpoint(**options)


def test_a_name_with_an_unknown_metric_has_0_in_its_place_which_is_said_once(make_trainer, make, folder, caplog):
    checkpoint = make(filename="{epoch}-{val_los:.1f}-{other}", monitor="val_loss")
    trainer = make_trainer(checkpoint).start()
    for score in (3.0, 2.0, 1.0):
        trainer.epoch(val_loss=score, acc=0.5)
    assert names(folder)[-1] == "epoch=2-val_los=0.0-other=0.ckpt"
    said = [message for message in caplog.messages if "val_los" in message]
    assert len(said) == 1
    assert "'val_los', 'other'" in said[0]
    assert "did you mean 'val_loss'" in said[0]


def test_a_monitor_that_does_not_exist_is_an_error_that_lists_those_that_do(make_trainer, make):
    trainer = make_trainer(make(monitor="val_los")).start()
    with pytest.raises(ConfigError, match=r"val_los.*did you mean 'val_loss'.*logged so far: acc, val_loss"):
        trainer.epoch(val_loss=1.0, acc=0.5)


def test_a_metric_of_a_validation_that_has_not_run_yet_is_waited_for(make_trainer, make, folder):
    checkpoint = make(monitor="val_loss", every_n_train_steps=1)
    trainer = make_trainer(checkpoint).start()
    trainer.step()
    trainer.step()
    assert names(folder) == []
    trainer.epoch(val_loss=1.0)
    trainer.step()
    assert names(folder) == ["epoch=1-step=4.ckpt"]


def test_a_metric_that_never_comes_is_an_error_after_the_first_validated_epoch(make_trainer, make):
    trainer = make_trainer(make(monitor="typo", every_n_train_steps=1)).start()
    trainer.num_val_batches = [4]
    trainer.step()
    for one in trainer.callbacks:
        one.on_train_epoch_end(trainer, None)  # no validation yet: a later one may log the monitor
    with pytest.raises(ConfigError, match="typo"):
        trainer.epoch(steps=0, val_loss=1.0)


def test_a_folder_that_cannot_be_used_is_refused_before_training(make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; choose another folder"):
        make_trainer(ModelCheckpoint(dirpath=tmp_path / "file" / "deep")).start()


def test_save_on_exception_is_refused_with_several_processes(make_trainer, make):
    trainer = make_trainer(make(save_on_exception=True))
    trainer.world_size = 2
    with pytest.raises(ConfigError, match="2 processes"):
        trainer.start()


# -- other behaviour


def test_the_folder_is_the_logger_s_or_the_default_one(make_trainer, tmp_path):
    checkpoint = ModelCheckpoint()
    trainer = make_trainer(checkpoint).start()
    assert checkpoint.dirpath == str(tmp_path / "checkpoints")
    trainer.log_folder = str(tmp_path / "logs" / "version_3")
    trainer.start()
    assert checkpoint.dirpath == str(tmp_path / "logs" / "version_3" / "checkpoints")


def test_another_rank_follows_rank_0_and_touches_nothing(make_trainer, make, folder, tmp_path):
    first, second = make(monitor="x", save_last=True), ModelCheckpoint(dirpath="elsewhere", monitor="x", save_last=True)
    leader, follower = make_trainer(first), make_trainer(second)
    sent = []

    class Pipe(type(leader.strategy)):
        def __init__(self, *, sends):
            super().__init__()
            self.environment = Environment(rank=0 if sends else 1, world_size=2)
            self.sends = sends

        def broadcast(self, value, source=0):
            if self.sends:
                sent.append(pickle.dumps(value))
                return value
            return pickle.loads(sent.pop(0))

    leader.strategy, follower.strategy = Pipe(sends=True), Pipe(sends=False)
    follower.is_global_zero, follower.world_size, leader.world_size = False, 2, 2
    follower.save_checkpoint = lambda path, weights_only: None
    for value in (None, 3.0, 4.0, 2.0, 1.0):
        for trainer in (leader, follower):
            trainer.start() if value is None else trainer.epoch(x=value)
        assert not sent
    assert second.state_dict() == first.state_dict()
    assert second.last_model_path == str(folder / "last.ckpt")


def test_weights_only_and_verbose(make_trainer, make, caplog):
    trainer = make_trainer(make(save_weights_only=True, verbose=True)).start()
    trainer.epoch()
    assert trainer.saved[0][1] is True
    assert "epoch=0-step=1.ckpt" in caplog.messages[0]


def test_the_state_loads_without_running_code(make_trainer, make, folder, tmp_path):
    checkpoint = make(monitor="x", save_top_k=2, save_last=True)
    trainer = make_trainer(checkpoint).start()
    for value in (2.0, 1.0):
        trainer.epoch(x=value)
    write_checkpoint(tmp_path / "s.ckpt", {"state_dict": checkpoint.state_dict()})
    copy = ModelCheckpoint(monitor="x", save_top_k=2, save_last=True)
    copy.load_state_dict(read_checkpoint(tmp_path / "s.ckpt")["state_dict"])
    assert copy.state_dict() == checkpoint.state_dict()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dirpath", 3),
        ("filename", 3),
        ("monitor", ["a", "b"]),
        ("save_top_k", None),
        ("save_top_k", "3"),
        ("save_top_k", -2),
        ("save_last", "yes"),
        ("mode", "best"),
        ("every_n_train_steps", "100"),
        ("every_n_train_steps", 1.5),
        ("every_n_epochs", -1),
        ("train_time_interval", 30),
        ("every", 100),
        ("save_weights_only", "no"),
        ("save_on_exception", "no"),
        ("auto_insert_metric_name", "no"),
        ("enable_version_counter", "no"),
        ("save_on_train_epoch_end", "no"),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ConfigError, match=rf"{name}=.*{value if isinstance(value, int) else ''}"):
        ModelCheckpoint(**{name: value})
