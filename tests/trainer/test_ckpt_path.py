"""``fit(ckpt_path="auto" | "last" | "best")``: the files they find or skip, and that all ranks find the same."""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path

import pytest
import torch

from fabricamp import CheckpointError, ConfigError
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import reading, storage
from fabricamp.loggers import CSVLogger
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


def fit(steps, folder=None, *, ckpt_path="auto", callbacks=None, module=None, **options):
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = quiet_trainer(
        max_steps=steps, max_epochs=-1, enable_checkpointing=True, callbacks=callbacks or checkpoint, **options
    )
    module = module or Classifier()
    trainer.fit(module, loader(32), ckpt_path=ckpt_path)
    return module, trainer


def damage(path, *, header=False):
    """Flips a bit of a tensor, or makes the file unreadable from its beginning."""
    content = bytearray(path.read_bytes())
    content[10 if header else len(content) // 2] ^= 16
    path.write_bytes(content[: len(content) // 3] if header else content)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(tmp_path):
    _, first = fit(4, tmp_path / "a")
    assert first.ckpt_path is None
    _, second = fit(8, tmp_path / "a")
    assert second.ckpt_path == str(tmp_path / "a" / "epoch=0-step=4.ckpt")
    module, _ = fit(8, tmp_path / "b")
    resumed, _ = fit(8, tmp_path / "a")
    for name, value in module.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_last_and_best_need_something(tmp_path):
    for words in ("last", "best"):
        with pytest.raises(
            CheckpointError, match=rf"ckpt_path='{words}': no ModelCheckpoint .* has saved one yet.*{tmp_path}"
        ):
            fit(4, tmp_path / "none", ckpt_path=words)
    with pytest.raises(CheckpointError, match="has no ModelCheckpoint"):
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(4), ckpt_path="last")
    assert quiet_trainer(max_epochs=1).fit(Classifier(), loader(4), ckpt_path="auto") is None
    with pytest.raises(ConfigError, match="'auto' is for fit"):
        quiet_trainer().validate(Classifier(), loader(4), ckpt_path="auto")


def test_how_far_a_file_is_it_says_itself(tmp_path):
    """The file's own counters decide, because clocks jump and users choose the names."""
    fit(4, tmp_path)
    for name, age in (("epoch=0-step=4.ckpt", 10_000), ("epoch=0-step=2.ckpt", 0)):
        os.utime(tmp_path / name, (2_000_000_000 - age,) * 2)
    _, resumed = fit(6, tmp_path)
    assert resumed.ckpt_path.endswith("step=4.ckpt")


def test_of_two_runs_into_one_folder_that_came_as_far_the_later_one_is_meant(tmp_path):
    _, first = fit(4, tmp_path)
    _, second = fit(4, tmp_path, ckpt_path=None)
    old, new = (trainer.checkpoint_callback.best_model_path for trainer in (first, second))
    assert old != new
    for seconds, path in enumerate((old, new)):
        os.utime(path, (seconds, seconds))
    for word in ("last", "auto", "best"):
        _, trainer = fit(4, tmp_path, ckpt_path=word)
        assert trainer.ckpt_path == new


@pytest.mark.parametrize("word", ["auto", "last"])
@pytest.mark.parametrize("header", [False, True])
def test_a_damaged_newest_file_falls_back_to_the_one_before_loudly(tmp_path, caplog, word, header):
    straight, _ = fit(8, tmp_path / "straight")
    fit(6, tmp_path / "cut")
    damage(tmp_path / "cut" / "epoch=0-step=6.ckpt", header=header)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        resumed, trainer = fit(8, tmp_path / "cut", ckpt_path=word)
    assert trainer.ckpt_path == str(tmp_path / "cut" / "epoch=0-step=4.ckpt")
    assert any(
        "skipped, trying an older checkpoint" in one.getMessage() and "step=6.ckpt" in one.getMessage()
        for one in caplog.records
    )
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_where_all_are_damaged_nothing_starts_anew_by_itself(tmp_path):
    fit(4, tmp_path)
    for name in names(tmp_path):
        damage(tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"none of 2 checkpoints can be read.*step=4\.ckpt.*step=2\.ckpt.*start anew"
    ):
        fit(8, tmp_path)


def test_a_given_path_never_falls_back(tmp_path):
    fit(4, tmp_path)
    damage(tmp_path / "epoch=0-step=4.ckpt")
    with pytest.raises(CheckpointError, match=r"step=4\.ckpt is damaged.*use an older one"):
        fit(8, tmp_path, ckpt_path=tmp_path / "epoch=0-step=4.ckpt")


def test_files_of_weights_alone_are_not_gone_on_from_while_there_are_others(tmp_path):
    whole = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="whole-{step}")
    weights = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="weights-{step}", save_weights_only=True)
    fit(3, callbacks=[whole, weights])
    _, resumed = fit(6, tmp_path)
    assert resumed.ckpt_path.endswith("whole-step=2.ckpt")
    for name in names(tmp_path):
        if not name.startswith("weights"):
            (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="holds weights only"):
        fit(6, tmp_path)


def test_partial_and_hidden_files_are_ignored_by_name(tmp_path):
    fit(2, tmp_path)
    (tmp_path / ".0123456789abcdef.ckpt.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("")
    assert fit(4, tmp_path)[1].ckpt_path.endswith("step=2.ckpt")


def test_names_with_folders_are_found(tmp_path):
    def checkpoint():
        return ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="at-{epoch}/{step}")

    fit(2, callbacks=checkpoint())
    assert fit(4, callbacks=checkpoint())[1].ckpt_path == str(tmp_path / "at-epoch=0" / "step=2.ckpt")


def test_without_a_folder_of_its_own_the_newest_run_that_has_a_file_is_gone_on_from(tmp_path):
    def run(steps, **options):
        return fit(steps, logger=CSVLogger(tmp_path, "run"), default_root_dir=tmp_path, **options)[1]

    assert run(2).ckpt_path is None
    assert run(4).ckpt_path == str(tmp_path / "run" / "version_0" / "checkpoints" / "epoch=0-step=2.ckpt")
    assert run(4).ckpt_path == str(tmp_path / "run" / "version_1" / "checkpoints" / "epoch=0-step=4.ckpt")
    # The third run made no folder, because it was at its limit already.
    assert run(6).ckpt_path == str(tmp_path / "run" / "version_1" / "checkpoints" / "epoch=0-step=4.ckpt")
    for name in names(tmp_path / "run" / "version_2" / "checkpoints"):
        damage(tmp_path / "run" / "version_2" / "checkpoints" / name)
    assert run(8).ckpt_path == str(tmp_path / "run" / "version_1" / "checkpoints" / "epoch=0-step=4.ckpt")


def test_best_is_known_to_another_process(tmp_path):
    class Scores(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("score", [3.0, 1.0, 2.0][self.current_epoch])

    def trainer():
        return quiet_trainer(
            max_epochs=3,
            enable_checkpointing=True,
            callbacks=ModelCheckpoint(tmp_path, "{epoch}", "score", save_last=True),
        )

    trainer().fit(Scores(), loader(8), loader(4))
    fresh = trainer()
    fresh.test(Scores(), loader(4), ckpt_path="best", verbose=False)
    assert fresh.ckpt_path == str(tmp_path / "epoch=1.ckpt")
    fresh.test(Scores(), loader(4), ckpt_path="last", verbose=False)
    assert torch.load(fresh.ckpt_path, weights_only=True)["global_step"] == 6


def test_ranks_agree_and_pass_over_the_same(tmp_path):
    def run(steps, word):
        _, trainer = fit(steps, tmp_path / "files", ckpt_path=word, strategy="ddp", devices="auto")
        return trainer.ckpt_path, trainer.global_step

    assert run_ranks(run, 2, 4, "auto", backend=None) == [(None, 4)] * 2
    damage(tmp_path / "files" / "epoch=0-step=4.ckpt")
    expected = (str(tmp_path / "files" / "epoch=0-step=2.ckpt"), 6)
    assert run_ranks(run, 2, 6, "auto", backend=None) == [expected] * 2


def cannot_read(word):
    """Makes this rank, in a process of its own, see files that no other rank sees, and fail to open those with ``word``."""
    opened = reading._opened

    def refuse(path):
        if word in str(path):
            raise CheckpointError(f"cannot read checkpoint {path}: Stale file handle")
        return opened(path)

    reading._opened = refuse
    storage.identity = lambda path: "its own"


def test_where_one_rank_cannot_read_it_every_rank_says_so(tmp_path):
    fit(2, tmp_path)

    def run():
        if os.environ["RANK"] == "1":
            cannot_read("step=2")
        with pytest.raises(CheckpointError, match="Stale file handle"):
            fit(4, tmp_path, strategy="ddp", devices="auto")
        return True

    assert run_ranks(run, 2, backend=None) == [True, True]


def rewrite(path, edit):
    """Rewrites the zip with changed members and right checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    edit(members)
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "edit",
    [
        lambda members: members.pop("a/data/1"),
        lambda members: members.update({"a/data/1": members["a/data/1"][:4]}),
        lambda members: members.update({"a/byteorder": b"big"}),
        lambda members: members.update({"a/data/1": members["a/data/1"] + b"more"}),
    ],
)
def test_auto_falls_back_from_a_file_that_only_fails_when_it_is_loaded(tmp_path, caplog, edit):
    straight, _ = fit(8, tmp_path / "straight")
    fit(6, tmp_path / "cut")
    newest = tmp_path / "cut" / "epoch=0-step=6.ckpt"
    # A file of a version without checksum footers: the damage is found only when the tensors are read.
    content = torch.load(newest, weights_only=True)
    del content["checksum"]
    torch.save(content, tmp_path / "cut" / "a.ckpt")
    (tmp_path / "cut" / "a.ckpt").replace(newest)
    rewrite(newest, edit)
    with pytest.raises(CheckpointError, match=r"step=6\.ckpt is damaged"):
        fit(8, tmp_path / "other", ckpt_path=newest)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        resumed, trainer = fit(8, tmp_path / "cut")
    assert trainer.ckpt_path == str(tmp_path / "cut" / "epoch=0-step=4.ckpt")
    assert any(
        "skipped, trying an older checkpoint" in one.getMessage() and "step=6.ckpt" in one.getMessage()
        for one in caplog.records
    )
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_where_one_rank_cannot_read_the_newest_every_rank_takes_the_one_before(tmp_path):
    fit(4, tmp_path)

    def run():
        if os.environ["RANK"] == "1":
            cannot_read("step=4")
        _, trainer = fit(4, tmp_path, strategy="ddp", devices="auto")
        return trainer.ckpt_path

    assert run_ranks(run, 2, backend=None) == [str(tmp_path / "epoch=0-step=2.ckpt")] * 2


def odd_names(folder):
    """Creates entries that have a checkpoint's name and are no checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "nothing.ckpt").symlink_to("gone.ckpt")
    (folder / "loop.ckpt").symlink_to("loop.ckpt")
    (folder / "last.ckpt").mkdir()
    os.mkfifo(folder / "pipe.ckpt")


def test_what_looks_like_a_checkpoint_is_never_silently_no_checkpoint(tmp_path, caplog):
    for name in ("nothing", "loop", "last", "pipe"):
        odd_names(tmp_path / name)
        for other in names(tmp_path / name):
            if other != f"{name}.ckpt":
                (tmp_path / name / other).rmdir() if other == "last.ckpt" else (tmp_path / name / other).unlink()
        with pytest.raises(CheckpointError, match=rf"none of 1 checkpoints can be read.*{name}\.ckpt.*start anew"):
            fit(2, tmp_path / name)
    caplog.clear()
    fit(4, tmp_path / "good")
    odd_names(tmp_path / "good")
    with caplog.at_level(logging.WARNING, "fabricamp"):
        assert fit(6, tmp_path / "good")[1].ckpt_path == str(tmp_path / "good" / "epoch=0-step=4.ckpt")
    assert sum("skipped, trying an older checkpoint" in one.getMessage() for one in caplog.records) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up root takes root")
def test_a_folder_that_may_not_be_listed_is_not_taken_for_an_empty_one(tmp_path):
    folder = tmp_path / "shared"
    fit(4, folder)
    for one in (tmp_path, *tmp_path.parents):
        if one.stat().st_uid == os.geteuid() and str(one).startswith("/tmp/"):
            one.chmod(one.stat().st_mode | 0o011)
    folder.chmod(0o733)

    def run():
        os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=rf"{folder} cannot be listed \(Permission denied\).*start anew"):
                fit(8, folder)
        finally:
            os.seteuid(0)
        return True

    assert run_ranks(run, 1, backend=None) == [True]
    folder.chmod(0o755)


@pytest.mark.parametrize(("count", "ckpt_path", "said"), [("2", None, True), ("2", "auto", False), ("0", None, False)])
def test_a_restart_that_begins_anew_is_told(count, ckpt_path, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    fit(2, tmp_path, ckpt_path=ckpt_path)
    assert (
        "torchrun has restarted this run from the beginning; ckpt_path='auto' would resume it" in caplog.text
    ) is said


@pytest.mark.parametrize(("given", "meant"), [("bst", "best"), ("lats", "last"), ("Best", "best"), ("autoo", "auto")])
def test_a_misspelt_word_is_named(given, meant, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"ckpt_path='{given}' is not there; did you mean '{meant}'"):
        fit(4, tmp_path, ckpt_path=given)


def test_a_path_that_looks_like_a_word_is_a_path(tmp_path, monkeypatch):
    _, trainer = fit(2, tmp_path)
    monkeypatch.chdir(tmp_path)
    Path(trainer.checkpoint_callback.best_model_path).rename("bst")
    assert fit(4, tmp_path, ckpt_path="bst")[1].ckpt_path == "bst"
    for path in ("bests/bst", "bst.ckpt", "weights"):  # a folder, a suffix, nothing near
        with pytest.raises(CheckpointError) as caught:
            fit(4, tmp_path, ckpt_path=path)
        assert "did you mean 'best'" not in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        trainer.validate(Classifier(), loader(4), ckpt_path="autoo")
    assert "did you mean" not in str(caught.value), "'auto' is for fit"
