"""AsyncCheckpoint: writes a ModelCheckpoint's files while training continues."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fabricamp import Callback, CheckpointError
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint, _checkpoint_files, async_checkpoint
from fabricamp.callbacks.base import matched_states
from fabricamp.checkpoint import file as checkpoint_file
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.loggers import CSVLogger
from fabricamp.ops.shards import local
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.inside import session
from tests.small import Classifier, loader, quiet_trainer


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


class Disk:
    """Replaces ``write_checkpoint``: waits for ``go``, counts concurrent writes, and raises ``failure`` if that is set."""

    def __init__(self):
        self.go = threading.Event()
        self.writing = threading.Event()
        self.thread = None
        self.at_once = 0
        self.most_at_once = 0
        self.failure = None

    def __call__(self, path, state):
        self.thread = threading.current_thread()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.writing.set()
        assert self.go.wait(30)
        try:
            if self.failure:
                raise self.failure
            write_checkpoint(path, state)
        finally:
            self.at_once -= 1

    def join(self):
        """Waits until the writer's thread has ended, behind a save whose predecessors have ended."""
        assert self.writing.wait(30)
        self.thread.join()
        self.writing.clear()


@pytest.fixture
def disk(monkeypatch):
    one = Disk()
    monkeypatch.setattr(async_checkpoint, "write_checkpoint", one)
    return one


@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_the_files_are_the_same_bit_for_bit(tmp_path, precision, monkeypatch):
    """Both write to the same path, one run after the other: states contain file names, and files contain the attempt's id."""
    monkeypatch.setattr(_checkpoint_files, "secrets", SimpleNamespace(token_hex=lambda size: "0" * 2 * size))
    folder, contents = tmp_path / "files", []
    for kind in (ModelCheckpoint, AsyncCheckpoint):
        # The same state key for both, because the file contains it.
        named = type("Named", (kind,), {"state_key": "checkpoint"})
        checkpoint = named(folder, every="2 steps, 1 epoch", save_top_k=-1, monitor="step", filename="{step}")
        trainer = quiet_trainer(max_epochs=2, precision=precision, enable_checkpointing=True, callbacks=checkpoint)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            trainer.fit(Classifier(), loader(12))
        contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
        for file in folder.iterdir():
            file.unlink()
    assert sorted(contents[0]) == [f"step={step}.ckpt" for step in (2, 3, 4, 6)]
    assert contents[0] == contents[1]


def test_training_goes_on_while_the_file_is_written(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(checkpoint).start()
    for _ in range(3):
        trainer.step()
    assert disk.writing.wait(30)
    assert not folder.exists()
    assert checkpoint.best_model_path == "", "published after the write"
    disk.go.set()
    disk.join()
    trainer.step()
    checkpoint.on_train_end(trainer, None)
    assert names(folder) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    assert checkpoint.best_model_path == str(folder / "epoch=0-step=4.ckpt")


def test_what_was_written_is_published_at_the_next_step(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=5)
    trainer = make_trainer(checkpoint).start()
    disk.go.set()
    for _ in range(5):
        trainer.step()
    disk.join()
    trainer.step()
    assert checkpoint.best_model_path == str(folder / "epoch=0-step=5.ckpt")


def test_one_is_in_flight_at_most_and_the_end_waits(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=1, save_last=True)
    trainer = make_trainer(checkpoint).start()
    threading.Timer(0.2, disk.go.set).start()
    for _ in range(4):
        trainer.step()
    checkpoint.on_train_end(trainer, None)
    assert disk.most_at_once == 1
    assert names(folder) == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 4


@pytest.mark.parametrize("failure", [CheckpointError("cannot write: quota"), MemoryError("quota")])
def test_a_failure_surfaces_at_the_next_step_and_the_old_files_stay(make_trainer, folder, disk, failure):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(checkpoint).start()
    disk.go.set()
    for _ in range(2):
        trainer.step()
    disk.join()
    trainer.step()
    good = checkpoint.best_model_path
    disk.failure = failure
    trainer.step()
    disk.join()
    with pytest.raises(CheckpointError, match="quota"):
        trainer.step()
    assert names(folder) == ["epoch=0-step=2.ckpt"]
    assert checkpoint.best_model_path == good


def test_a_failure_of_the_last_write_is_raised_by_the_end_of_training(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=1)
    trainer = make_trainer(checkpoint).start()
    disk.failure = CheckpointError("quota")
    disk.go.set()
    trainer.step()
    with pytest.raises(CheckpointError, match="quota"):
        checkpoint.on_train_end(trainer, None)


def test_whatever_ends_training_lets_the_write_come_to_its_end(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=1)
    trainer = make_trainer(checkpoint).start()
    threading.Timer(0.2, disk.go.set).start()
    trainer.step()
    trainer.interrupt(ValueError("of the user"))
    assert names(folder) == ["epoch=0-step=1.ckpt"]
    assert checkpoint.best_model_path.endswith("step=1.ckpt")


def test_a_second_ctrl_c_does_not_wait_for_the_disk(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=1)
    trainer = make_trainer(checkpoint).start()
    trainer.step()
    trainer.state.stage = None  # as outside of any stage of the Trainer
    trainer.interrupt()
    assert not folder.exists()
    disk.go.set()


def test_ctrl_c_saves_what_the_write_in_flight_did_not(make_trainer, folder, disk):
    checkpoint = AsyncCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(checkpoint).start()
    disk.go.set()
    disk.failure = CheckpointError("quota")
    for _ in range(2):
        trainer.step()
    disk.join()
    with pytest.warns(RuntimeWarning, match="quota"):
        trainer.interrupt()
    assert read_checkpoint(checkpoint.last_model_path)["global_step"] == 2


def test_it_travels_to_workers(folder):
    assert pickle.loads(pickle.dumps(AsyncCheckpoint(folder))).dirpath == str(folder)


class Removes(Callback):
    """Removes the folder at some step, like a user who frees disk space."""

    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            shutil.rmtree(self.folder, ignore_errors=True)  # a background write may create a file meanwhile


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("moment", ["before", "create", "fsync", "verify", "sync"])
@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_a_folder_that_is_removed_in_the_run_is_made_again(folder, kind, moment, save_last, monkeypatch):
    """The folder is removed between two steps, or at one of several points of a write, before or after the rename."""
    calls = []

    def removing(real):
        def call(*args, **options):
            calls.append(moment)
            if len(calls) == 3:
                shutil.rmtree(folder)
            return real(*args, **options)

        return call

    owner, name = {
        "before": (None, ""),
        "create": (checkpoint_file, "create"),
        "fsync": (os, "fsync"),
        "verify": (checkpoint_file, "verify_zip"),
        "sync": (checkpoint_file, "sync"),
    }[moment]
    if owner is not None:
        monkeypatch.setattr(owner, name, removing(getattr(owner, name)))
    others = [Removes(folder, 5)] if moment == "before" else []
    checkpoint = kind(folder, every_n_train_steps=2, save_top_k=-1, monitor="step", mode="max", save_last=save_last)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[*others, checkpoint])
    trainer.fit(Classifier(), loader(32))
    assert moment == "before" or len(calls) > 3
    assert checkpoint.best_model_path == str(folder / "epoch=0-step=8.ckpt")
    assert read_checkpoint(checkpoint.best_model_path)["global_step"] == 8
    if save_last:
        assert read_checkpoint(checkpoint.last_model_path)["global_step"] == 8


class Disturbs(Callback):
    """Changes the weights right after the checkpoint was requested."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2:
            with torch.no_grad():
                module.net[0].bias.fill_(7.0)


def test_ranks_save_and_agree(tmp_path):
    def work():
        checkpoint = AsyncCheckpoint(tmp_path, every="2 steps", save_last=True, save_top_k=-1, monitor="step")
        trainer = quiet_trainer(
            max_epochs=2, strategy="ddp", devices="auto", enable_checkpointing=True, callbacks=[Disturbs(), checkpoint]
        )
        trainer.fit(Classifier(), loader(32))
        return checkpoint.last_model_path, checkpoint.best_model_path, checkpoint.state_dict()

    one, other = run_ranks(work, 2, backend=None)
    assert one == other
    assert names(tmp_path) == sorted(
        [*(f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 2), (0, 4), (1, 6), (1, 8))), "last.ckpt"]
    )
    assert not torch.equal(
        read_checkpoint(tmp_path / "epoch=0-step=2.ckpt")["state_dict"]["net.0.bias"], torch.full((16,), 7.0)
    )
    assert read_checkpoint(one[0])["global_step"] == 8


def test_a_failure_on_rank_0_ends_every_rank(tmp_path):
    def work():
        def refuse(path, state):
            raise CheckpointError("quota")

        async_checkpoint.write_checkpoint = refuse
        checkpoint = AsyncCheckpoint(tmp_path, every="2 steps")
        trainer = quiet_trainer(
            max_steps=2, strategy="ddp", devices="auto", enable_checkpointing=True, callbacks=checkpoint
        )
        with pytest.raises(CheckpointError, match="quota"):
            trainer.fit(Classifier(), loader(32))
        return checkpoint.best_model_path

    assert run_ranks(work, 2, backend=None) == ["", ""]


class Late(CSVLogger):
    """Has its values on disk only after a later step; until then no checkpoint may get its name."""

    def __init__(self, folder):
        super().__init__(folder)
        self.further = threading.Event()
        self.waited = []

    def barrier(self, step):
        if not self.further.is_set():
            self.waited.append(self.further.wait(30))
        super().barrier(step)


class Goes(Callback):
    """Reports when training reaches its third step, and overwrites the current weights and optimizer states."""

    def __init__(self, further):
        self.further = further

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3:
            self.further.set()
            with torch.no_grad():
                for one in (
                    *module.parameters(),
                    *(state["exp_avg"] for state in trainer.optimizers[0].state.values()),
                ):
                    local(one).fill_(7.0)


class Adam(Classifier):
    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


def sharded_fit(*callbacks, max_steps=4, ckpt_path=None, **options):
    torch.manual_seed(5)
    module = Adam()
    trainer = quiet_trainer(
        max_steps=max_steps,
        strategy="fsdp",
        devices="auto",
        enable_checkpointing=True,
        callbacks=[*callbacks],
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, loader(64, shuffle=True), ckpt_path=ckpt_path)
    return module.state_dict() if trainer.is_global_zero else None


def test_ranks_that_hold_parts_write_a_folder_beside_training(tmp_path):
    def work():
        logger = Late(tmp_path / "logs")
        beside = AsyncCheckpoint(tmp_path / "beside", every="2 steps", save_top_k=-1, monitor="step", mode="max")
        sharded_fit(Goes(logger.further), beside, logger=logger)
        straight = sharded_fit(ModelCheckpoint(tmp_path / "waited", every="2 steps", save_top_k=-1, monitor="step"))
        gone_on = sharded_fit(ckpt_path=tmp_path / "beside" / "epoch=0-step=2.ckpt")
        if os.environ["RANK"] == "1":
            FileSystemWriter.write_data = refuse
        failing = AsyncCheckpoint(tmp_path / "failing", every="2 steps")
        with pytest.raises(CheckpointError, match="quota"):
            sharded_fit(failing)
        return logger.waited, beside.best_model_path, straight, gone_on, failing.best_model_path

    def refuse(*_):
        raise OSError(errno.EDQUOT, "quota")

    one, other = run_ranks(work, 2)
    assert (one[0], other[0]) == ([True], []), "training went on meanwhile"
    assert one[1] == other[1] == str(tmp_path / "beside" / "epoch=0-step=4.ckpt")
    assert {name: value.tolist() for name, value in one[2].items()} == {
        name: value.tolist() for name, value in one[3].items()
    }
    beside, waited = (read_checkpoint(tmp_path / kind / "epoch=0-step=2.ckpt") for kind in ("beside", "waited"))
    for kind in ("state_dict", "optimizer_states"):
        assert repr(beside[kind]) == repr(waited[kind])
    assert one[4] == other[4] == ""
    assert names(tmp_path / "failing") == []


class Ends(Callback):
    """Requests an interruption in step 3; all ranks then end after step 4."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        agreement = session(trainer).agreement
        if trainer.global_step == 3:
            agreement.request("SIGTERM")
            for _ in range(3):
                agreement.wait_for_answers()  # up to 10 s
            assert agreement.settled


def test_a_signal_at_the_step_whose_file_fails_ends_all_ranks_with_one(tmp_path, monkeypatch):
    """Only rank 0's write fails; then all ranks save that step again."""

    def refuse(path, state):
        raise CheckpointError("the disk is full")

    def work():
        trainer = quiet_trainer(
            strategy="ddp",
            devices="auto",
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=[Ends(), AsyncCheckpoint(tmp_path, every_n_train_steps=4)],
        )
        with pytest.warns(RuntimeWarning, match="the disk is full"), pytest.raises(SystemExit):
            trainer.fit(Classifier(), loader(64))
        return trainer.global_step, trainer.checkpoint_callback.last_model_path

    monkeypatch.setattr(async_checkpoint, "write_checkpoint", refuse)
    assert run_ranks(work, 2) == [(4, str(tmp_path / "epoch=0-step=4.ckpt"))] * 2
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]


class WaitsForFile(Callback):
    """Lets the file of step 2 be complete before step 3 ends: then rank 0 publishes it, and no other rank."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            writer = trainer.checkpoint_callback._writer
            while trainer.is_global_zero and not writer.finished:
                time.sleep(0.01)


def test_a_file_that_only_rank_0_knows_of_at_the_end_of_training(tmp_path):
    """With ``save_last`` the other ranks saved once more, by themselves, and waited for ever."""

    def work():
        saver = AsyncCheckpoint(tmp_path, every_n_train_steps=2, save_last=True)
        trainer = quiet_trainer(
            strategy="ddp",
            devices="auto",
            max_steps=3,
            enable_checkpointing=True,
            callbacks=[WaitsForFile(), saver],
        )
        trainer.fit(Classifier(), loader(64))
        return trainer.global_step, saver.last_model_path, saver.best_model_path

    one, other = run_ranks(work, 2, timeout=60.0)
    assert one == other == (3, str(tmp_path / "last.ckpt"), str(tmp_path / "epoch=0-step=2.ckpt"))


class Falls(Classifier):
    """Logs 1.0 as ``v`` in its first steps, and 9.0 after them."""

    def training_step(self, batch, batch_idx):
        self.log("v", 1.0 if self.global_step < 5 else 9.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("first", [ModelCheckpoint, AsyncCheckpoint])
def test_the_class_that_writes_the_same_files_goes_on_with_them(first, tmp_path):
    def fit(folder, kind, steps):
        callbacks = [
            kind(tmp_path / folder / cadence, every=cadence, monitor="v", save_top_k=1, save_last=True)
            for cadence in ("2 steps", "3 steps")
        ]
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(Falls(), loader(128), ckpt_path="auto")
        return [float(one.best_model_score) for one in callbacks]

    for second in (ModelCheckpoint, AsyncCheckpoint):
        fit(second.__name__, first, 8)
        scores = fit(second.__name__, second, 20)
        assert scores == [1.0, 1.0]
    for cadence in ("2 steps", "3 steps"):
        assert names(tmp_path / "ModelCheckpoint" / cadence) == names(tmp_path / "AsyncCheckpoint" / cadence)


def test_states_go_to_the_callback_with_their_arguments_first():
    async_ones = [AsyncCheckpoint(every=every, monitor="v") for every in ("3 steps", "2 steps", "7 steps")]
    states = {ModelCheckpoint(every=every, monitor="v").state_key: every for every in ("2 steps", "3 steps", "5 steps")}
    found = {callback.every_n_train_steps: state for callback, state in matched_states(async_ones, states)}
    assert found == {2: "2 steps", 3: "3 steps", 7: "5 steps"}

    class Mine(ModelCheckpoint):
        pass

    assert not list(matched_states([Mine(every="2 steps", monitor="v")], states))
