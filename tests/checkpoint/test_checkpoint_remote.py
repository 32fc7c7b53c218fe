"""Checkpoints at URLs: through fsspec's memory file system, which like an object store has no links and no rename."""

from __future__ import annotations

import io

import fsspec
import pytest
import torch

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import copy_checkpoint, link_checkpoint, read_checkpoint, storage, write_checkpoint
from fabricamp.errors import CheckpointError, ConfigError
from tests.small import Classifier, loader, quiet_trainer


def state(fill=1.0):
    return {"state_dict": {"weight": torch.full((100,), fill)}, "epoch": 3, "global_step": 40}


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def test_a_url_is_written_and_read(memory):
    for fill in (1.0, 2.0):
        write_checkpoint("memory://runs/deep/a.ckpt", state(fill))
    assert read_checkpoint("memory://runs/deep/a.ckpt")["state_dict"]["weight"][0] == 2
    assert list(memory.store) == ["/runs/deep/a.ckpt"]
    for make in (copy_checkpoint, link_checkpoint):
        make("memory://runs/deep/a.ckpt", "memory://runs/b.ckpt")
        assert read_checkpoint("memory://runs/b.ckpt")["epoch"] == 3


def test_file_urls_are_paths(tmp_path):
    write_checkpoint(f"file://{tmp_path}/a.ckpt", state())
    assert read_checkpoint(tmp_path / "a.ckpt")["epoch"] == 3
    assert storage.normalized(f"file://{tmp_path}/a.ckpt") == str(tmp_path / "a.ckpt")


def test_what_goes_wrong_there_leaves_the_old_file_alone(memory, monkeypatch):
    write_checkpoint("memory://runs/a.ckpt", state(1.0))
    save = torch.save

    def save_damaged(value, file):
        written = io.BytesIO()
        save(value, written)
        content = bytearray(written.getvalue())
        content[1000] ^= 0xFF
        file.write(content)

    monkeypatch.setattr(torch, "save", save_damaged)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint memory://runs/a\.ckpt: .*(CRC|checksum)"):
        write_checkpoint("memory://runs/a.ckpt", state(2.0))
    monkeypatch.setattr(type(memory), "_open", lambda *_, **__: (_ for _ in ()).throw(ValueError("no credentials")))
    with pytest.raises(CheckpointError, match="no credentials"):
        write_checkpoint("memory://runs/a.ckpt", state(2.0))
    monkeypatch.undo()
    assert read_checkpoint("memory://runs/a.ckpt")["state_dict"]["weight"][0] == 1
    assert list(memory.store) == ["/runs/a.ckpt"]


def test_missing_and_damaged_ones_are_named(memory):
    write_checkpoint("memory://runs/epoch=3.ckpt", state())
    with pytest.raises(
        CheckpointError, match=r"no checkpoint memory://runs/epoch=4\.ckpt; did you mean 'epoch=3\.ckpt'"
    ):
        read_checkpoint("memory://runs/epoch=4.ckpt")
    memory.store["/runs/epoch=3.ckpt"].truncate(500)
    with pytest.raises(CheckpointError, match=r"memory://runs/epoch=3\.ckpt is damaged"):
        read_checkpoint("memory://runs/epoch=3.ckpt")


def test_an_unknown_protocol_is_refused_before_training():
    with pytest.raises(ConfigError, match="nowhere"):
        quiet_trainer(enable_checkpointing=True, callbacks=ModelCheckpoint("nowhere://runs")).fit(
            Classifier(), loader(4)
        )


@pytest.mark.parametrize("save_last", [True, "link"])
def test_a_run_rotates_and_resumes_there(memory, save_last):
    def fit(epochs, **options):
        checkpoint = ModelCheckpoint("memory://runs", save_last=save_last, enable_version_counter=False)
        trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=checkpoint)
        trainer.fit(Classifier(), loader(8), **options)
        return trainer

    fit(3, ckpt_path="auto")
    names = sorted(name.removeprefix("/runs/") for name in memory.store)
    assert [name for name in names if "previous" not in name] == [
        "epoch=1-step=4.ckpt",
        "epoch=2-step=6.ckpt",
        "last.ckpt",
    ]
    assert len(names) == 4, "a copy is a file of its own here, and so is the one before it"
    assert fit(4, ckpt_path="auto").global_step == 8
    resumed = fit(5, ckpt_path="memory://runs/last.ckpt")
    assert (resumed.global_step, resumed.checkpoint_callback.best_model_path) == (
        10,
        "memory://runs/epoch=4-step=10.ckpt",
    )
    assert fit(5, ckpt_path="best").global_step == 10
