"""WandbLogger: the real package writes runs offline, and their files are read back."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from fabricamp import Callback, loggers
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.loggers import WandbLogger
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

AXIS = "trainer/global_step"


@pytest.fixture(autouse=True, scope="module")
def _anew():
    """Imports the package here, as each worker collects this file and few run its tests, and resets it.

    It reads its environment variables only once per process; an earlier test may have set others.
    """
    global wandb, Record  # noqa: PLW0603 - names of a package that is imported here
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs the package wandb").Record
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """Forbids the network, and ends a run that a test leaves open."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    wandb.finish()


def records(file):
    """Yields the records of a ``.wandb`` file: LevelDB's log after a header of 7 bytes, in blocks of 32 KiB with split records.

    Ends before a record of which the service has written only the first bytes.
    """
    data, at, whole = Path(file).read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield Record.FromString(whole)
            whole = b""


def whole_run(file):
    """Returns all records of a finished run; waits for the last ones, which the service writes a moment later."""
    deadline = time.monotonic() + 100
    found = []
    while not any(one.HasField("exit") for one in found):
        assert time.monotonic() < deadline, f"{file} has no end: {[one.WhichOneof('record_type') for one in found]}"
        found = list(records(file))
        time.sleep(0.01)
    return found


class Written:
    """The run that was written last below a folder with ``count`` runs."""

    def __init__(self, folder, count=1):
        wandb.finish()  # writes what is still in memory
        files = sorted(
            Path(folder).glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name
        )  # the name begins with the time in seconds
        assert len(files) == count
        self.history, self.config, self.metrics = [], {}, []
        for record in whole_run(files[-1]):
            if record.HasField("run"):
                self.run = record.run
                self._take(record.run.config)
            elif record.HasField("config"):
                self._take(record.config)
            elif record.HasField("metric"):
                self.metrics.append(record.metric)
            elif record.HasField("history"):
                items = record.history.item
                self.history.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})

    def _take(self, config):
        self.config |= {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in config.update}

    def rows(self, *names):
        return [tuple(row.get(name) for name in names) for row in self.history]


def fit(logger, *callbacks, model=None, ckpt_path=None, **options):
    options = {"max_steps": 4, "log_every_n_steps": 1, "enable_checkpointing": bool(callbacks), **options}
    trainer = quiet_trainer(logger=logger, callbacks=list(callbacks), **options)
    trainer.fit(model or Classifier(), loader(), ckpt_path=ckpt_path)
    return trainer


def test_a_fit_is_a_run_on_the_axis_of_its_steps(tmp_path):
    logger = WandbLogger("first", tmp_path / "runs", project="digits", prefix="p", tags=["a"], version="abc")
    trainer = fit(logger)
    assert (logger.name, logger.version, logger.save_dir) == ("digits", "abc", str(tmp_path / "runs"))
    assert trainer.log_dir == logger.log_dir == str(tmp_path / "runs" / "digits" / "abc")
    assert wandb.run is logger.experiment  # still open for use after fit
    written = Written(tmp_path / "runs")
    run = written.run
    assert (run.run_id, run.display_name, run.project, list(run.tags)) == ("abc", "first", "digits", ["a"])
    assert [step for step, loss in written.rows(AXIS, "p-loss") if loss is not None] == [0, 1, 2, 3]
    (every,) = [one for one in written.metrics if one.glob_name == "*"]
    assert (every.step_metric, every.options.step_sync) == (AXIS, True)


def with_offline_alone():
    del os.environ["WANDB_MODE"]  # in a separate process, because the package reads it only once
    os.environ.pop("WANDB_SERVICE", None)
    fit(WandbLogger(offline=True), devices=1)
    wandb.finish()


def test_it_writes_below_the_current_folder_without_a_name(tmp_path):
    run_ranks(with_offline_alone, 1)
    assert Written(tmp_path).run.project == "fabricamp_logs"


def test_hyperparameters_are_plain_values_of_its_config(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    class Owner(Classifier):
        def __init__(self, net, sizes, token):
            super().__init__()
            self.save_hyperparameters()

    monkeypatch.setenv("TOKEN", "geheim")
    token = OmegaConf.create({"a": "${oc.env:TOKEN}"})
    logger = WandbLogger()
    fit(logger, model=Owner(torch.nn.ReLU, (1, 2), token))
    logger.log_hyperparams({"more": token})
    config = Written(tmp_path).config
    assert config["more"] == {"a": "${oc.env:TOKEN}"}
    assert {name: config[name] for name in ("net", "sizes", "token")} == {
        "net": "torch.nn.modules.activation.ReLU",
        "sizes": [1, 2],
        "token": {"a": "${oc.env:TOKEN}"},
    }
    for file in tmp_path.glob("wandb/offline*/**/*"):
        assert file.is_dir() or b"geheim" not in file.read_bytes()


def test_what_others_may_not_see_is_not_sent(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    class Owner(Classifier):
        def __init__(self, options):
            super().__init__()
            self.save_hyperparameters()

    monkeypatch.setenv("PIN", "4711")
    options = OmegaConf.create({"pin": "${oc.decode:${oc.env:PIN}}"})
    logger = WandbLogger()
    logger.private = True
    with pytest.warns(UserWarning, match=r"sends no hyper-parameters.*config.update"):
        fit(logger, model=Owner(options))
    assert "options" not in Written(tmp_path).config


def test_a_resumed_fit_goes_on_in_its_run(tmp_path):
    first = WandbLogger()
    saved = fit(first, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, monitor="step"), max_steps=2)
    file = saved.checkpoint_callback.best_model_path
    assert file.startswith(str(tmp_path / "fabricamp_logs" / first.version / "checkpoints"))
    wandb.finish()
    time.sleep(1)  # offline runs with one id that start in the same second share a folder
    again = WandbLogger()
    resumed = fit(again, ModelCheckpoint(), ckpt_path="last")
    assert resumed.global_step == 4
    assert again.version == first.version
    assert again.log_dir == resumed.log_dir != first.log_dir  # each attempt has its own folder
    written = Written(tmp_path, 2)
    assert written.run.run_id == first.version
    assert [step for step, loss in written.rows(AXIS, "loss") if loss is not None] == [
        1,
        2,
        3,
    ]  # step 1 was after the checkpoint
    wandb.finish()
    own = WandbLogger(id="mine")
    fit(own, ckpt_path=file)
    assert own.version == "mine"


def test_ids_come_from_who_knows_them(monkeypatch):
    assert WandbLogger().identity() != WandbLogger().identity()
    open_already = wandb.init(id="open")
    assert WandbLogger().identity() == WandbLogger(experiment=open_already).version == "open"
    with pytest.warns(UserWarning, match=r"continues the run open.*wandb.finish"):
        assert WandbLogger(id="other").experiment is open_already
    monkeypatch.setenv("WANDB_RUN_ID", "sweep")
    assert WandbLogger().version == "sweep"


def in_a_rank(folder, rank_of_hook):
    class Draws(Classifier):
        def on_train_start(self):
            self.logger.experiment.config.update({"rank": self.trainer.global_rank})
            self.logger.log_text("note", ["a"], [["hello"]])
            self.logger.watch(self)
            self.logger.unwatch(self)

    logger = WandbLogger(save_dir=folder)
    fit(logger, model=Draws(), devices=2, strategy="ddp")
    return logger.version, wandb.run is not None


def test_all_ranks_have_one_run_which_rank_0_opens(tmp_path):
    (version, _), other = run_ranks(in_a_rank, 2, tmp_path, None)
    assert other == (version, False)
    written = Written(tmp_path)
    assert written.run.run_id == version
    assert written.config["rank"] == 0
    assert [step for step, loss in written.rows(AXIS, "loss") if loss is not None] == [0, 1, 2, 3]


def test_processes_of_the_trainer_end_their_run(tmp_path):
    logger = WandbLogger()
    fit(logger, devices=2, strategy="ddp", start_method="fork")
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{logger.version}.wandb")
    assert [one.exit.exit_code for one in whole_run(file) if one.HasField("exit")] == [0]


def with_a_copy(pickled):
    twin = pickle.loads(pickled)
    twin.log_metrics({"there": 1}, 1)
    twin.close()
    return twin.version


def test_a_copy_for_another_process_logs_to_the_open_run(tmp_path):
    logger = WandbLogger()
    logger.log_metrics({"here": 1}, 0)
    assert run_ranks(with_a_copy, 1, pickle.dumps(logger), start_method="spawn") == [logger.version]
    logger.log_metrics({"here": 1}, 2)
    assert Written(tmp_path).rows(AXIS, "here", "there") == [(0, 1, None), (1, None, 1), (2, 1, None)]


def test_what_is_watched_before_the_fit_is_watched_in_the_run_that_goes_on(tmp_path):
    first = WandbLogger()
    saved = fit(first, ModelCheckpoint(tmp_path / "files"), max_steps=2)
    wandb.finish()
    time.sleep(1)  # offline runs with one id that start in the same second share a folder
    again, model = WandbLogger(), Classifier()
    again.watch(model, log_freq=1)
    fit(again, model=model, ckpt_path=saved.checkpoint_callback.best_model_path)
    assert again.version == first.version
    names = {name for row in Written(tmp_path, 2).history for name in row}
    assert [name for name in names if name.startswith("gradients/net.2.weight")]
    again.unwatch(model)


def test_tables_and_images_come_with_their_step(tmp_path):
    logger = WandbLogger()
    logger.log_table("table", ["a", "b"], [[1, 2]], step=3)
    logger.log_image("digits", [torch.rand(1, 4, 4), torch.rand(1, 4, 4)], step=4, caption=["one", "two"])
    logger.log_metrics({}, 5)
    with pytest.raises(ConfigError, match="give a list of images"):
        logger.log_image("digits", [torch.rand(1, 4, 4)], caption=["one", "two"])
    table, image = Written(tmp_path).history
    assert (table[AXIS], table["table/nrows"], image[AXIS], image["digits/captions"]) == (3, 1, 4, ["one", "two"])


def test_sounds_and_videos_come_with_their_step(tmp_path, monkeypatch):
    class Media:  # the package's own class needs soundfile and moviepy
        def __init__(self, data, **options):
            made.append((type(self).__name__, data, options))

    made, logged = [], []
    for name in ("Audio", "Video"):
        monkeypatch.setattr(wandb, name, type(name, (Media,), {}))
    logger = WandbLogger()
    monkeypatch.setattr(logger.experiment, "log", logged.append)
    logger.log_audio("sounds", ["a.wav", "b.wav"], step=3, sample_rate=[8000, 16000])
    logger.log_video("films", ["c.mp4"], step=4)
    rates = [{"sample_rate": 8000}, {"sample_rate": 16000}]
    assert made == [("Audio", "a.wav", rates[0]), ("Audio", "b.wav", rates[1]), ("Video", "c.mp4", {})]
    assert [(row[AXIS], len(row.get("sounds", row.get("films")))) for row in logged] == [(3, 2), (4, 1)]
    with pytest.raises(ValueError, match="give a list of audios"):
        logger.log_audio("sounds", "a.wav")


class Artifact:
    def __init__(self, *found):
        self.found = found

    def download(self, root):
        return self.found, root


def test_artifacts_are_used_and_downloaded(tmp_path, monkeypatch):
    class Api:
        def artifact(self, name, **options):
            return Artifact("api", name, options["type"])

    monkeypatch.setattr(wandb, "Api", Api)
    assert WandbLogger.download_artifact("a:v0", artifact_type="model") == (("api", "a:v0", "model"), None)
    logger = WandbLogger()
    monkeypatch.setattr(
        logger.experiment, "use_artifact", lambda name, **options: Artifact("run", name, *options.values())
    )
    assert logger.use_artifact("a:v0", "model").found == ("run", "a:v0", "model")
    assert logger.download_artifact("a:v0", tmp_path) == (("run", "a:v0"), str(tmp_path))
    assert logger.download_artifact("a:v0", use_artifact=False) == (("api", "a:v0", None), None)


def signal_the_service(number):
    """Sends a signal to the service, the process that writes for the package."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process may have ended meanwhile
            name, rest = status.read_text().rsplit(")", 1)
            if name.endswith("(wandb-core") and int(rest.split()[1]) == os.getpid():
                os.kill(int(status.parent.name), number)
                if number == signal.SIGKILL:  # waits until the service's connections are closed
                    os.waitid(os.P_PID, int(status.parent.name), os.WEXITED | os.WNOWAIT)


class KillsTheService(Callback):
    """Kills the service before step 2."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.logger.barrier(2)
            signal_the_service(signal.SIGKILL)


def with_a_service_that_dies(folder):
    os.chdir(folder)
    os.environ.pop("WANDB_SERVICE", None)  # this process starts its own service
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = fit(WandbLogger(), KillsTheService(), enable_checkpointing=False)
    return trainer.global_step, [str(one.message) for one in caught if one.category is RuntimeWarning]


def test_a_service_that_dies_costs_values_and_not_the_run(tmp_path):
    ((steps, told),) = run_ranks(with_a_service_that_dies, 1, tmp_path)
    assert steps == 4
    assert "WandbLogger: " in told[0]
    assert "training continues" in told[0]
    assert "lost, of the steps 2 to 3" in told[1]


class StopsTheService(Callback):
    """Stops the service at step 2, and logs in each step more than its socket's buffer can hold."""

    rows = {f"row{number}": float(number) for number in range(20_000)}  # noqa: RUF012 - never changed

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2:
            signal_the_service(signal.SIGSTOP)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.logger.log_metrics(self.rows, trainer.global_step)

    def on_train_end(self, trainer, module):
        assert not trainer.logger._queue.wait(0)  # values are still queued; a step that sent them itself would hang


def with_a_service_that_hangs(folder):
    os.chdir(folder)
    os.environ.pop("WANDB_SERVICE", None)
    loggers.wandb.LAST_SECONDS = 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = fit(WandbLogger(), StopsTheService(), enable_checkpointing=False, max_steps=8)
    signal_the_service(signal.SIGKILL)  # otherwise this process would wait for it at its end
    return trainer.global_step, [str(one.message) for one in caught if one.category is RuntimeWarning]


def test_a_service_that_hangs_holds_no_step_up(tmp_path):
    ((steps, told),) = run_ranks(with_a_service_that_hangs, 1, tmp_path)
    assert steps == 8
    assert "no answer within 0.5 s; training continues" in told[0]
    assert "to 8: no answer within 0.5 s" in told[1]


def artifacts_of(tmp_path):
    """Returns name, aliases, metadata and files of each artifact, in order of upload."""
    wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    return [
        (
            one.artifact.name,
            list(one.artifact.aliases),
            json.loads(one.artifact.metadata),
            [*one.artifact.manifest.contents],
        )
        for one in whole_run(file)
        if one.HasField("artifact") and one.artifact.type == "model"
    ]


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
def test_checkpoints_as_artifacts(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = kind(tmp_path / "files", "{step}", monitor="loss", mode="max", every_n_train_steps=1, save_top_k=1)
    logger = WandbLogger(log_model=True, id="abc")
    fit(logger, checkpoint)
    best = Path(checkpoint.best_model_path)
    ((name, aliases, metadata, files),) = artifacts_of(tmp_path)
    assert (name, sorted(aliases), [one.path for one in files]) == ("model-abc", ["best", "latest"], ["model.ckpt"])
    assert metadata["score"] == float(checkpoint.best_model_score)
    assert metadata["original_filename"] == best.name
    assert metadata["ModelCheckpoint"]["save_top_k"] == 1
    assert files[0].size == best.stat().st_size
    assert Path(files[0].local_path).read_bytes() == best.read_bytes()


def test_each_checkpoint_as_an_artifact_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = ModelCheckpoint(tmp_path / "files", "{step}", monitor="step", mode="max", every_n_train_steps=1)
    fit(WandbLogger(log_model="all", checkpoint_name="mine"), checkpoint, WaitsForUploads())
    found = artifacts_of(tmp_path)
    assert [(name, metadata["original_filename"]) for name, _, metadata, _ in found] == [
        ("mine", f"step={step}.ckpt") for step in (1, 2, 3, 4)
    ]
    wandb.finish()


class WaitsForUploads(Callback):
    """Waits for uploads: on a busy machine rotation would remove older files before they are read."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.logger._uploads._queue.wait()


def test_no_checkpoint_is_uploaded_where_that_was_not_asked_for(tmp_path):
    fit(WandbLogger(), ModelCheckpoint(tmp_path / "files"))
    assert artifacts_of(tmp_path) == []


def test_a_server_that_cannot_be_reached_is_asked_once_a_fit(monkeypatch):
    asked = []

    def unreachable(**options):
        asked.append(options)
        raise wandb.errors.CommError("timed out after 90 seconds")

    monkeypatch.setattr(wandb, "init", unreachable)
    logger = WandbLogger()
    for fits in (1, 2):
        with pytest.warns(RuntimeWarning) as told:
            assert fit(logger).global_step == 4
        assert len(asked) == fits
        assert "4 rows are lost, of the steps 0 to 3: timed out" in str(told[-1].message)


def test_no_save_waits_while_the_service_fails(monkeypatch):
    over, ended = threading.Event(), []

    def fails(row):
        if row["loss"]:
            over.wait(60)
            ended.append(row)
        raise ConnectionError("the service is gone")

    logger = WandbLogger()
    logger.begin()
    monkeypatch.setattr(logger.experiment, "log", fails)
    for step in range(2):
        logger.log_metrics({"loss": float(step)}, step)
    logger.barrier(2)
    assert ended == []
    over.set()
    with pytest.warns(RuntimeWarning, match="the service is gone"):
        logger.close()
    wandb.finish()


def test_no_step_waits_for_the_run_to_open(monkeypatch):
    class Notes(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(wandb.run is not None)
            return super().training_step(batch, batch_idx)

    seen = []
    fit(WandbLogger(), model=Notes())
    assert seen == [True] * 4


def test_a_wrong_key_ends_the_fit(monkeypatch):
    def refuses(**options):
        raise wandb.errors.AuthenticationError("invalid key")

    monkeypatch.setattr(wandb, "init", refuses)
    with pytest.raises(wandb.errors.AuthenticationError, match="invalid key"):
        fit(WandbLogger())


def test_what_it_does_not_take_is_named():
    with pytest.raises(ConfigError, match="log_model='best'.*'all'.*or False"):
        WandbLogger(log_model="best")
    with pytest.raises(ConfigError, match="add_file_policy='copy'.*'immutable'"):
        WandbLogger(add_file_policy="copy")
    with pytest.raises(ConfigError, match="no option 'entty'; did you mean 'entity'"):
        WandbLogger(entty="me")


def test_making_one_opens_nothing(tmp_path):
    assert WandbLogger(id="x").version == "x"
    assert WandbLogger(dir=tmp_path / "a", save_dir=None).save_dir == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    assert wandb.run is None
