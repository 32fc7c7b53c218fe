"""File names in a checkpoint: none outside the run's folders is opened, and files of other callbacks are never removed."""

from __future__ import annotations

import json
import os
import random
from collections import Counter

import fsspec
import pytest
import torch

from fabricamp import Callback, CheckpointError, seed_everything
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, storage
from fabricamp.loggers import CSVLogger
from tests.kill.attempts import Kill, attempt, import_everything
from tests.small import Classifier, loader, quiet_trainer


def fit(steps, *callbacks, ckpt_path="auto", module=None, **options):
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module or Classifier(), loader(64), ckpt_path=ckpt_path)
    return trainer


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def edited(source, target, edit, key=0):
    """Writes a copy of ``source`` with its callback's state changed by ``edit``, as an attacker who knows the layout could."""
    content = torch.load(source, weights_only=True)
    del content["checksum"]
    edit(content["callbacks"][list(content["callbacks"])[key]])
    torch.save(content, target)


class Probe(fsspec.AbstractFileSystem):
    """A remote host that records each request."""

    protocol = "probe"
    asked: list = []  # noqa: RUF012 - shared by all instances on purpose

    def info(self, path, **_):
        self.asked.append(path)
        raise FileNotFoundError(path)

    def ls(self, path, **_):
        self.asked.append(path)
        return []

    def _open(self, path, mode="rb", **_):
        self.asked.append(path)
        raise FileNotFoundError(path)


@pytest.fixture
def probe():
    fsspec.register_implementation("probe", Probe, clobber=True)
    Probe.asked.clear()
    return Probe.asked


@pytest.mark.parametrize("kind", ["here", "memory"])
def test_a_url_in_a_checkpoint_is_never_opened(tmp_path, probe, kind):
    folder = "memory://ownership/run" if kind == "memory" else str(tmp_path / "b")
    fit(2, ModelCheckpoint(tmp_path / "a", every_n_train_steps=2))
    urls = ["probe://host/x.ckpt", "probe::x.ckpt", f"{folder}/x::probe://host/y.ckpt", f"{folder}/probe://host/z.ckpt"]
    urls += ["simplecache::probe://host/u.ckpt", f"{folder}/../probe://host/v.ckpt"]
    storage.exists(urls[0])
    assert probe.pop(), "the test of the test: this is how a request shows"
    assert not any(storage.resolves_within(url, folder) for url in urls)

    def edit(state):
        state["files"] = [*urls, *state["files"]]
        state["best_k_models"] = dict.fromkeys(urls, 0.0)
        state["best_model_path"], state["last_model_path"], state["spare"] = urls[0], urls[1], urls[2]

    edited(tmp_path / "a" / "epoch=0-step=2.ckpt", tmp_path / "hostile.ckpt", edit)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    fit(8, checkpoint, ckpt_path=tmp_path / "hostile.ckpt")
    assert not checkpoint.known_files() & set(urls)
    (tmp_path / "c").mkdir()
    (tmp_path / "hostile.ckpt").replace(tmp_path / "c" / "hostile.ckpt")
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=ModelCheckpoint(tmp_path / "c", every_n_train_steps=2))
    with pytest.raises(CheckpointError, match="names probe://host/x.ckpt as the best, which is not a .ckpt file in"):
        trainer.test(Classifier(), loader(4), ckpt_path="best")
    assert not probe
    fsspec.filesystem("memory").store.clear()


def test_only_regular_files_below_the_folder_are_followed(tmp_path):
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    for path in (folder / "a.ckpt", folder / "inner" / "b.ckpt", tmp_path / "beside" / "c.ckpt"):
        path.touch()
    os.mkfifo(folder / "pipe.ckpt")
    (folder / "within.ckpt").symlink_to("inner/b.ckpt")
    (folder / "out.ckpt").symlink_to(tmp_path / "beside" / "c.ckpt")
    (folder / "beside").symlink_to(tmp_path / "beside")
    (folder / "device.ckpt").symlink_to("/dev/zero")
    names = [
        *("a.ckpt", "inner/b.ckpt", "within.ckpt"),
        *("pipe.ckpt", "device.ckpt", "inner", "gone.ckpt", "out.ckpt", "beside/c.ckpt", "../beside/c.ckpt"),
    ]
    assert [name for name in names if storage.resolves_within(f"{folder}/{name}", str(folder))] == names[:3]


def test_a_name_without_its_suffix_is_not_followed(tmp_path):
    fit(2, ModelCheckpoint(tmp_path, every_n_train_steps=2))
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")

    def edit(state):
        state.update(files=[str(notes), *state["files"]], best_model_path=str(notes), last_model_path=str(notes))

    newest = tmp_path / "epoch=0-step=2.ckpt"
    edited(newest, newest, edit)
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=ModelCheckpoint(tmp_path, every_n_train_steps=2))
    with pytest.raises(CheckpointError, match=r"notes\.txt as the best, which is not a \.ckpt file in"):
        trainer.validate(WithValidation(), loader(4), ckpt_path="best")
    resumed = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    fit(2, resumed)
    assert resumed.known_files() == {str(newest)}


def test_only_what_it_wrote_itself_is_removed(tmp_path):
    folder = tmp_path / "files"
    theirs = ModelCheckpoint(folder, "theirs-{step}", every_n_train_steps=2, save_top_k=-1, monitor="step")
    fit(4, theirs, ckpt_path=None)
    fit(4, ModelCheckpoint(folder, every_n_train_steps=2), ckpt_path=None)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "outside.ckpt").write_bytes((folder / "epoch=0-step=2.ckpt").read_bytes())
    (folder / "link.ckpt").symlink_to(tmp_path / "outside.ckpt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "deep.ckpt").write_bytes((folder / "epoch=0-step=2.ckpt").read_bytes())
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    others = [
        "notes.txt",
        "theirs-step=2.ckpt",
        "theirs-step=4.ckpt",
        "link.ckpt",
        "inner/deep.ckpt",
        "../outside.ckpt",
    ]

    def edit(state):
        state["files"] = [*(f"{folder}/{name}" for name in others), *state["files"]]
        state["last_model_path"], state["spare"] = f"{folder}/theirs-step=4.ckpt", f"{folder}/theirs-step=2.ckpt"

    edited(folder / "epoch=0-step=4.ckpt", tmp_path / "hostile.ckpt", edit)
    fit(12, ModelCheckpoint(folder, every_n_train_steps=2, save_last=True), ckpt_path=tmp_path / "hostile.ckpt")
    assert all((folder / name).exists() for name in others)
    own = [name for name in names(folder) if name.startswith("epoch")]
    assert own == ["epoch=0-step=10.ckpt", "epoch=0-step=12.ckpt"], "those of before the resume were its own, and went"


def test_files_in_a_folder_that_is_new_to_the_run_stay(tmp_path):
    """No file of the callback is in the folder, so no file's header shows which ones are its own."""
    fit(4, ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=2), ckpt_path=None)
    fit(4, ModelCheckpoint(tmp_path / "mine", every_n_train_steps=2), ckpt_path=None)
    victims = [f"{tmp_path}/theirs/{name}" for name in names(tmp_path / "theirs")]

    def edit(state):
        state.update(files=victims, last_model_path=victims[0], spare=victims[1], best_model_path=victims[0])

    edited(tmp_path / "mine" / "epoch=0-step=4.ckpt", tmp_path / "hostile.ckpt", edit)
    resumed = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=2, save_last=True)
    fit(10, resumed, ckpt_path=tmp_path / "hostile.ckpt")
    assert set(names(tmp_path / "theirs")) == {
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
        "epoch=0-step=8.ckpt",
        "epoch=0-step=10.ckpt",
        "last.ckpt",
    }


def test_files_of_another_branch_stay(tmp_path):
    """Two runs resume from the same older file; neither removes the other's later files."""

    def run(steps, path=None):
        checkpoint = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=2, monitor="step", mode="max", save_top_k=3
        )
        fit(steps, checkpoint, ckpt_path=path)

    run(12)
    assert names(tmp_path) == ["step=10.ckpt", "step=12.ckpt", "step=8.ckpt"]
    run(16, tmp_path / "step=8.ckpt")
    assert {"step=10.ckpt", "step=12.ckpt"} <= set(names(tmp_path)), "beyond where the second one left"
    assert {"step=12-v1.ckpt", "step=14.ckpt", "step=16.ckpt"} <= set(names(tmp_path))
    run(20, tmp_path / "step=16.ckpt")
    assert {"step=10.ckpt", "step=12.ckpt", "step=16.ckpt", "step=18.ckpt", "step=20.ckpt"} == set(names(tmp_path))


class Scores(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("score", torch.tensor([5.0, 1.0, 9.0, 8.0, 7.0, 6.0][min(self.global_step // 2, 5)]))
        return super().training_step(batch, batch_idx)


def test_the_best_so_far_survives_new_folders_of_runs(tmp_path):
    def checkpoint():
        return ModelCheckpoint(monitor="score", every_n_train_steps=2, filename="{step}")

    def run(steps):
        callback = checkpoint()
        fit(
            steps, callback, module=Scores(), logger=CSVLogger(tmp_path), default_root_dir=tmp_path, log_every_n_steps=1
        )
        return callback

    best = run(4).best_model_path
    assert "version_0" in best
    for steps in (6, 8, 10):
        assert run(steps).best_model_path == best
    fresh = quiet_trainer(
        enable_checkpointing=True, callbacks=checkpoint(), logger=CSVLogger(tmp_path), default_root_dir=tmp_path
    )
    fresh.validate(WithValidation(), loader(4), ckpt_path="best", verbose=False)
    assert fresh.ckpt_path == best


class WithValidation(Scores):
    def validation_step(self, batch, batch_idx):
        pass


def test_two_that_differ_in_cadence_alone_each_keep_their_own_files(tmp_path):
    def paced(pace, folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=pace)

    fit(12, paced(2, "a"), paced(3, "b"))
    assert names(tmp_path / "a") == ["step=10.ckpt", "step=12.ckpt"]
    assert names(tmp_path / "b") == ["step=12.ckpt", "step=9.ckpt"]
    fit(18, paced(2, "a"), paced(3, "b"))
    assert names(tmp_path / "a") == ["step=16.ckpt", "step=18.ckpt"]
    assert names(tmp_path / "b") == ["step=12.ckpt", "step=15.ckpt", "step=18.ckpt"], "resumed from 12"
    fit(20, paced(4, "b"), paced(2, "a"))  # b, with another interval, continues with its own files in either order
    assert names(tmp_path / "a") == ["step=18.ckpt", "step=20.ckpt"]
    assert names(tmp_path / "b") == ["step=18.ckpt", "step=20.ckpt"]


def test_a_state_of_before_keys_had_lengths_is_loaded_and_its_files_stay(tmp_path):
    """A file of the first version has no interval in the state key and no attempts."""
    first = ModelCheckpoint(tmp_path, "{step}", monitor="step", mode="max", every_n_train_steps=2)
    fit(4, first)
    for name in names(tmp_path):
        content = torch.load(tmp_path / name, weights_only=True)
        ((key, state),) = content["callbacks"].items()
        for added in ("attempt", "earlier_attempts"):
            del state[added]
        content["callbacks"] = {key.partition(" every ")[0]: state}
        del content["checksum"], content["written_by"]
        torch.save(content, tmp_path / name)
    resumed = ModelCheckpoint(tmp_path, "{step}", monitor="step", mode="max", every_n_train_steps=2)
    assert fit(10, resumed).ckpt_path == str(tmp_path / "step=4.ckpt")
    assert names(tmp_path) == ["step=10.ckpt", "step=2.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert resumed.best_model_path == str(tmp_path / "step=10.ckpt")


def several(folder):
    """Returns a run with four ModelCheckpoints: every step, every second step, only weights every third, and in the background."""

    def job(armed):
        seed_everything(7, verbose=False)
        callbacks = [
            ModelCheckpoint(folder / "files", "a-{step}", every_n_train_steps=1, save_last=True),
            ModelCheckpoint(folder / "files", "b-{step}", "step", mode="max", save_top_k=3, every_n_train_steps=2),
            ModelCheckpoint(folder / "files", "w-{step}", every_n_train_steps=3, save_weights_only=True),
            AsyncCheckpoint(folder / "files", "c-{step}", every_n_train_steps=2),
        ]
        trainer = quiet_trainer(max_steps=12, max_epochs=-1, enable_checkpointing=True, callbacks=[*callbacks, armed])
        trainer.fit(Classifier(), loader(64), ckpt_path="auto")

    return job


def kinds(folder):
    return Counter(name[:1] for name in names(folder / "files") if not name.startswith("."))


def kill_several(folder, kills, seed):
    """Kills each training several times; at its end there have to be as many files of each kind as without kills."""
    import_everything(folder / "warm")
    assert attempt(several(folder / "straight"), folder / "straight", world_size=1).finished
    expected = kinds(folder / "straight")
    operations = json.loads((folder / "straight" / "attempt-counts-0").read_text())["operation"]
    draw, killed, training = random.Random(seed), 0, 0
    while killed < kills:
        here = folder / f"training{training}"
        for _ in range(3):
            moment = Kill(0, "operation", draw.randint(operations // 6, operations))
            killed += bool(attempt(several(here), here, moment, world_size=1).phase)
        for _ in range(2):  # a run keeps the file that it resumed from; the next run removes it
            assert attempt(several(here), here, world_size=1).finished
        assert kinds(here) == expected, names(here / "files")
        for name in names(here / "files"):
            if name.endswith(".ckpt"):
                read_checkpoint(here / "files" / name)
        training += 1


def test_several_leave_no_orphans_after_kills(tmp_path):
    kill_several(tmp_path, 3, seed=3)


def test_what_a_kill_left_behind_the_last_save_goes_when_the_run_is_started_again(tmp_path):
    files = tmp_path / "files"
    four = loader(16, 4)

    def fit(*more):
        callback = ModelCheckpoint(files, "{step}", every_n_train_steps=1)
        trainer = quiet_trainer(max_steps=4, max_epochs=-1, enable_checkpointing=True, callbacks=[callback, *more])
        trainer.fit(Classifier(), four, ckpt_path="auto")

    class Copies(Callback):
        def on_train_batch_end(self, trainer, *_):
            for file in files.glob("step=*.ckpt"):
                (tmp_path / file.name).write_bytes(file.read_bytes())

    fit(Copies())
    assert names(files) == ["step=3.ckpt", "step=4.ckpt"]
    # As if the run was killed after it wrote step=4 and before it removed step=2; no later save would remove that file.
    (files / "step=2.ckpt").write_bytes((tmp_path / "step=2.ckpt").read_bytes())
    fit()
    assert names(files) == ["step=3.ckpt", "step=4.ckpt"]


@pytest.mark.slow
def test_several_leave_no_orphans_after_a_hundred_kills(tmp_path):
    kill_several(tmp_path, 100, seed=4)


def test_the_file_that_a_run_resumed_from_stays_until_the_next_resume(tmp_path):
    def fit(steps, from_step=None):
        files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[files], enable_checkpointing=True)
        path = None if from_step is None else str(tmp_path / f"step={from_step}.ckpt")
        trainer.fit(Classifier(), loader(16), ckpt_path=path)
        return {name for name in names(tmp_path) if name.endswith(".ckpt")}

    assert fit(6) == {"step=4.ckpt", "step=6.ckpt"}, "the two newest"
    assert fit(12, from_step=6) == {"step=6.ckpt", "step=10.ckpt", "step=12.ckpt"}, (
        "and the one that the run began with"
    )
    assert fit(14, from_step=12) == {"step=12.ckpt", "step=14.ckpt"}, "the next run has removed it"
