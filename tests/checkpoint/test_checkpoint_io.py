"""``Trainer(plugins=[CheckpointIO])``: the calls of a plug-in, the files, failures, background writes and several ranks."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint, OnExceptionCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.checkpoint_io import WrappingCheckpointIO
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from fabricamp.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from tests.small import Classifier, loader, quiet_trainer


class Files(CheckpointIO):
    """Writes one file with ``torch.save``, and records its calls."""

    def __init__(self):
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(("save", Path(path).name))
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None):  # as plug-ins of earlier releases: without weights_only
        self.calls.append(("load", Path(path).name))
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path):
        self.calls.append(("remove", Path(path).name))
        Path(path).unlink()


class Folders(CheckpointIO):
    """Writes a folder of two files."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).mkdir()
        torch.save(checkpoint["state_dict"], Path(path, "weights"))
        torch.save({key: value for key, value in checkpoint.items() if key != "state_dict"}, Path(path, "rest"))

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        rest = torch.load(Path(path, "rest"), weights_only=True)
        return {**rest, "state_dict": torch.load(Path(path, "weights"), weights_only=True)}

    def remove_checkpoint(self, path):
        for file in Path(path).iterdir():
            file.unlink()
        Path(path).rmdir()


class Store(CheckpointIO):
    """Writes no file: checkpoints are in memory."""

    def __init__(self):
        self.held = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.held[path] = pickle.dumps(checkpoint)

    def load_checkpoint(self, path, map_location=None, **options):
        return pickle.loads(self.held[path])

    def remove_checkpoint(self, path):
        del self.held[path]


class FullDisk(Files):
    def __init__(self, fails_at):
        super().__init__()
        self.left = fails_at

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError("the disk is full")
        super().save_checkpoint(checkpoint, path)


class Scored(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("v", torch.tensor(1.0 / (1 + self.current_epoch)))


def train(io, folder, *callbacks, epochs=2, ckpt_path=None, **options):
    saving = callbacks or (ModelCheckpoint(folder, monitor="v"),)
    trainer = quiet_trainer(plugins=[io], callbacks=[*saving], max_epochs=epochs, enable_checkpointing=True, **options)
    module = Scored()
    trainer.fit(module, loader(16), loader(8), ckpt_path=ckpt_path)
    return trainer, {name: value.clone() for name, value in module.state_dict().items()}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- calls and files


def test_saves_loads_and_removals_go_through_the_plug_in(tmp_path):
    io = Files()
    trainer, _ = train(io, tmp_path, ModelCheckpoint(tmp_path, monitor="v", save_last=True))
    assert names(tmp_path) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert io.calls == [
        ("save", ".partial-epoch=0-step=4.ckpt"),
        ("save", ".partial-last.ckpt"),
        ("save", ".partial-epoch=1-step=8.ckpt"),
        ("remove", "epoch=0-step=4.ckpt"),
        ("save", ".partial-last.ckpt"),
    ]
    assert trainer.strategy.checkpoint_io is io
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    layout = {
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "state_dict",
        "loops",
        "callbacks",
        "optimizer_states",
        "lr_schedulers",
    }
    assert saved.keys() >= layout
    trainer.validate(ckpt_path="best", dataloaders=loader(8), verbose=False)
    assert io.calls[-1] == ("load", "epoch=1-step=8.ckpt")


@pytest.mark.parametrize("kind", [Files, Folders])
@pytest.mark.parametrize("word", ["last", "path"])
def test_a_resumed_run_equals_a_straight_one(kind, word, tmp_path):
    _, straight = train(kind(), tmp_path / "straight", epochs=4)
    train(kind(), tmp_path / "files")
    path = "last" if word == "last" else str(tmp_path / "files" / "epoch=1-step=8.ckpt")
    trainer, resumed = train(kind(), tmp_path / "files", epochs=4, ckpt_path=path)
    assert same(resumed, straight)
    # The file that the run was resumed from stays.
    assert names(tmp_path / "files") == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]
    assert Path(trainer.checkpoint_callback.best_model_path).name == "epoch=3-step=16.ckpt"


def test_a_plug_in_that_writes_no_file(tmp_path):
    io = Store()
    _, straight = train(Store(), tmp_path, epochs=4)
    trainer, _ = train(io, tmp_path)
    (path,) = io.held
    assert path == str(tmp_path / "epoch=1-step=8.ckpt")
    assert names(tmp_path) == []
    _, resumed = train(io, tmp_path, epochs=4, ckpt_path=path)
    assert same(resumed, straight)
    assert trainer.checkpoint_callback.best_model_path == path


def test_weights_only_is_passed_only_where_it_is_taken(tmp_path):
    seen = []

    class Takes(Files):
        def load_checkpoint(self, path, map_location=None, weights_only=None):
            seen.append(weights_only)
            return torch.load(path, weights_only=True)

    train(Takes(), tmp_path)
    train(Takes(), tmp_path, epochs=3, ckpt_path=tmp_path / "epoch=1-step=8.ckpt")
    train(Files(), tmp_path, epochs=4, ckpt_path=tmp_path / "epoch=2-step=12.ckpt")
    assert set(seen) == {True}, "None is True: torch.load(weights_only=None) follows an environment variable"


def test_a_plug_in_that_only_loads_keeps_todays_files(tmp_path):
    """darts always passes such a plug-in, which loads with weights_only=False."""
    loaded = []

    class Trusting(TorchCheckpointIO):
        def load_checkpoint(self, path, map_location=None, weights_only=None):
            loaded.append(Path(path).name)
            return torch.load(path, map_location=map_location, weights_only=False)

    _, straight = train(Trusting(), tmp_path / "straight", epochs=4)
    train(Trusting(), tmp_path / "files", AsyncCheckpoint(tmp_path / "files", monitor="v"))
    assert names(tmp_path / "files") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"], "the newest two"
    assert read_checkpoint(tmp_path / "files" / "epoch=1-step=8.ckpt")["global_step"] == 8
    loaded.clear()
    _, resumed = train(Trusting(), tmp_path / "files", epochs=4, ckpt_path=tmp_path / "files" / "epoch=1-step=8.ckpt")
    assert same(resumed, straight)
    assert "epoch=1-step=8.ckpt" in loaded


def test_a_plug_in_around_another(tmp_path):
    class Noted(WrappingCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint({**checkpoint, "noted": True}, path)

    train(Noted(Files()), tmp_path)
    assert torch.load(tmp_path / "epoch=1-step=8.ckpt", weights_only=True)["noted"] is True
    train(Noted(), tmp_path / "own")
    assert read_checkpoint(tmp_path / "own" / "epoch=1-step=8.ckpt")["noted"] is True


def test_a_file_at_an_exception_goes_through_the_plug_in(tmp_path):
    class Fails(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise ZeroDivisionError

    train(Files(), tmp_path, OnExceptionCheckpoint(tmp_path, filename="error"))  # removes no missing file
    io = Files()
    saving = OnExceptionCheckpoint(tmp_path, filename="error")
    with pytest.raises(ZeroDivisionError):
        train(io, tmp_path, saving, Fails())
    assert io.calls == [("save", ".partial-error.ckpt")]
    assert names(tmp_path) == ["error.ckpt"]


# -- failures


def test_a_save_that_raises_leaves_the_older_file(tmp_path):
    io = FullDisk(fails_at=2)
    with pytest.raises(ZeroDivisionError, match="the disk is full"):
        train(io, tmp_path)
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]
    assert ("remove", "epoch=0-step=4.ckpt") not in io.calls


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_save_in_the_background_that_raises(fails_at, tmp_path):
    with pytest.raises(ZeroDivisionError, match="the disk is full"):
        train(AsyncCheckpointIO(FullDisk(fails_at)), tmp_path)
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"][: fails_at - 1]


def test_what_a_plug_in_cannot_load_is_named(tmp_path):
    class Wrong(Files):
        def load_checkpoint(self, path, map_location=None):
            return {"weights": 1}

    train(Files(), tmp_path)
    with pytest.raises(CheckpointError, match=r"Wrong.load_checkpoint\(.*\) returned a dict with the keys 'weights'"):
        train(Wrong(), tmp_path, epochs=3, ckpt_path=tmp_path / "epoch=1-step=8.ckpt")
    with pytest.raises(FileNotFoundError, match="Files found no checkpoint"):
        train(Files(), tmp_path, epochs=3, ckpt_path=tmp_path / "none.ckpt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plugins": [Files(), Files()]}, "two CheckpointIOs"),
        ({"plugins": Files(), "strategy": "fsdp"}, "Files with strategy='fsdp'"),
        ({"plugins": AsyncCheckpointIO(Files()), "strategy": "fsdp"}, "Files with strategy='fsdp'"),
        ({"plugins": Files(), "callbacks": AsyncCheckpoint()}, "Files in plugins and an AsyncCheckpoint"),
    ],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(enable_checkpointing=True, **options)


# -- in the background


def test_async_without_another_plug_in_is_our_async_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="v")
    key = checkpoint.state_key
    trainer, _ = train(AsyncCheckpointIO(), tmp_path, checkpoint)
    assert isinstance(trainer.checkpoint_callback, AsyncCheckpoint)
    assert (trainer.checkpoint_callback, checkpoint.state_key) == (checkpoint, key)
    assert isinstance(pickle.loads(pickle.dumps(checkpoint)), AsyncCheckpoint)
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    default = quiet_trainer(plugins=AsyncCheckpointIO(), enable_checkpointing=True)
    assert isinstance(default.checkpoint_callback, AsyncCheckpoint)


def test_one_write_is_in_flight_and_a_removal_waits_for_it(tmp_path):
    order = []
    trained = threading.Event()

    class Slow(Files):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if len(order) == 1:  # training continues meanwhile
                assert trained.wait(60)
            order.append(("begin", checkpoint["global_step"]))
            super().save_checkpoint(checkpoint, path)
            order.append(("end", checkpoint["global_step"]))

        def remove_checkpoint(self, path):
            order.append(("remove", Path(path).name))
            super().remove_checkpoint(path)

    class Trains(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                order.append("trained")
                trained.set()

    order.append("start")
    trainer, _ = train(AsyncCheckpointIO(Slow()), tmp_path, ModelCheckpoint(tmp_path, monitor="v"), Trains())
    assert order == [
        *["start", "trained", ("begin", 4), ("end", 4), ("begin", 8), ("end", 8), ("remove", "epoch=0-step=4.ckpt")],
    ]
    assert names(tmp_path) == ["epoch=1-step=8.ckpt"]
    assert not [one for one in threading.enumerate() if one.name == "fabricamp-checkpoint"]
    trainer.test(ckpt_path="best", dataloaders=loader(8), verbose=False)


class Loss:
    """An object that has no plain form."""

    scale = 3


@pytest.mark.parametrize("background", [False, True])
def test_a_plug_in_gets_objects_as_they_are(background, tmp_path):
    class Saves(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["loss"] = Loss()

    class Pickles(Files):
        def load_checkpoint(self, path, map_location=None, weights_only=None):
            return torch.load(path, weights_only=weights_only)

    io = AsyncCheckpointIO(Pickles()) if background else Pickles()
    checkpoint = ModelCheckpoint(tmp_path, monitor="v")
    train(io, tmp_path, checkpoint, Saves(), checkpoint_objects=True)
    found = torch.load(tmp_path / "epoch=1-step=8.ckpt", weights_only=False)
    assert type(found["loss"]) is Loss
    with pytest.raises(CheckpointObjectsError, match=r"holds objects .*Loss, says .*IO.*weights_only=False"):
        train(io if background else AsyncCheckpointIO(io), tmp_path, epochs=3, ckpt_path="last")


class Noticed:
    """Records the thread in which it is rebuilt, and draws a random number there."""

    threads: ClassVar = []

    def __setstate__(self, state):
        self.threads.append(threading.current_thread())
        torch.rand(1)

    def __getstate__(self):
        return {"a": 1}


def test_the_background_gets_objects_that_were_rebuilt_at_the_save(tmp_path, monkeypatch):
    """Also if torch's environment variable forbids the objects of every file: these objects are from no file."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(Noticed, "threads", [])
    io = AsyncCheckpointIO(Files())
    generator = torch.get_rng_state()
    io.save_checkpoint({"state_dict": {}, "x": Noticed()}, tmp_path / "a.ckpt")
    assert torch.equal(torch.get_rng_state(), generator)
    io.wait()
    assert Noticed.threads == [threading.main_thread()]
    assert (tmp_path / "a.ckpt").exists()


# -- two processes


class Ranks(Files):
    """Records the calling rank in a file."""

    def __init__(self, notes):
        super().__init__()
        self.notes = str(notes)

    def note(self, what):
        with Path(self.notes).open("a") as file:
            file.write(json.dumps([what, torch.distributed.get_rank()]) + "\n")

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.note("save")
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path, map_location=None):
        self.note("load")
        return super().load_checkpoint(path, map_location)

    def remove_checkpoint(self, path):
        self.note("remove")
        super().remove_checkpoint(path)


@pytest.mark.parametrize("background", [False, True])
def test_two_ranks(background, tmp_path):
    def made():
        return AsyncCheckpointIO(Ranks(tmp_path / "notes")) if background else Ranks(tmp_path / "notes")

    ranks = {"devices": 2, "strategy": "ddp", "start_method": "fork"}
    train(made(), tmp_path / "files", **ranks)
    _, resumed = train(made(), tmp_path / "files", epochs=3, ckpt_path="last", **ranks)
    _, straight = train(Files(), tmp_path / "straight", epochs=3, **ranks)
    assert same(resumed, straight)
    calls = [tuple(json.loads(line)) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [call for call in calls if call[0] != "load"] == [("save", 0), ("save", 0), ("remove", 0), ("save", 0)]
    assert {rank for what, rank in calls if what == "load"} == {0, 1}


def test_two_ranks_of_which_one_cannot_save(tmp_path):
    with pytest.raises(Exception, match="the disk is full"):
        train(FullDisk(2), tmp_path, devices=2, strategy="ddp", start_method="fork")
    assert names(tmp_path) == ["epoch=0-step=2.ckpt"]
